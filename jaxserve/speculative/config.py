"""What a user asks of speculation: vLLM's names, checked. Knows no model, plan or device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

WITH_PAGES = ("draft_model", "eagle", "eagle3")  # what keeps KV of its own beside the target's
BY_MODEL = (*WITH_PAGES, "medusa")  # whose drafts a checkpoint of its own makes
METHODS = ("ngram", "suffix", *BY_MODEL)
ACCEPTANCES = ("sampled", "rejection")
LOOKUP_MIN, LOOKUP_MAX = 1, 3  # where neither is given; vLLM's 5 and 5 found too little, and drafts that lose are not verified
MAX_DRAFTS, MAX_LOOKUP, MAX_TREE_DEPTH, MAX_CACHED_REQUESTS = 64, 64, 256, 1_000_000

# The fields that one method alone has, with their defaults.
OF_METHOD: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": LOOKUP_MIN, "prompt_lookup_max": LOOKUP_MAX},
    "suffix": {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    },
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and which of them stand.

    method: "ngram": what followed the most recent earlier occurrence of the last tokens (prompt lookup). "suffix": what followed
      the longest earlier occurrences of the last tokens most often, in the request itself and in outputs of earlier ones.
      "draft_model": what a smaller model of the same vocabulary says. "eagle", "eagle3": what an EAGLE head of the target says.
      "medusa": what Medusa heads of the target say.
    model: of the last four: the checkpoint that drafts, as the target's is named.
    num_speculative_tokens: most drafts a sequence and step; of "medusa" no more than there are heads.
    prompt_lookup_min, prompt_lookup_max: of "ngram": tokens that must recur; the longest is tried first. One alone is both; 1 and 3
      if neither is given.
    suffix_decoding_max_tree_depth: of "suffix": most tokens of a match and its drafts together. 24 if not given.
    suffix_decoding_max_cached_requests: outputs of earlier requests that are kept; 0: drafts come from the request's own tokens
      alone. 10,000 if not given.
    suffix_decoding_max_spec_factor: most drafts for each token of the match. 1.0 if not given.
    suffix_decoding_min_token_prob: least share of the occurrences that a draft and those before it followed. 0.1 if not given.
    acceptance: "sampled": at each position the token is drawn that would have been drawn without drafts, and a draft stands if it
      is that one: the output does not depend on drafting. "rejection": rejection sampling (Leviathan et al., ICML 2023): the output
      is distributed alike, but which tokens are drawn depends on the drafts. Drafts of "ngram" and "suffix" are accepted equally
      often under both.
    adaptive: as many drafts as pay, by the acceptance and the times of steps so far: while requests queue for a row, as many as
      give the most tokens a second, else as many as give the least time per token, averaged over the rows; none where they lose, on
      a few rows or on all. Otherwise always num_speculative_tokens.

    Raises:
      ValueError: a value that is missing, of the wrong type, out of range, or of another method.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    acceptance: str = "sampled"
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative_config: method={self.method!r} must be one of {', '.join(METHODS)}")
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"speculative_config: acceptance={self.acceptance!r} must be one of {', '.join(ACCEPTANCES)}")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"speculative_config: adaptive={self.adaptive!r} must be True or False")
        _require_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        for method, own in OF_METHOD.items():
            for name in own:
                if method != self.method and getattr(self, name) is not None:
                    raise ValueError(
                        f"speculative_config: {name} is of method={method!r}, and method is {self.method!r}: leave it out"
                    )
        if self.method not in BY_MODEL and self.model is not None:
            raise ValueError(f"speculative_config: method={self.method!r} takes no model, found model={self.model!r}: leave it out")
        if self.method in BY_MODEL and not (isinstance(self.model, str) and self.model):
            raise ValueError(
                f"speculative_config: method={self.method!r} needs model, the checkpoint that drafts, found {self.model!r}"
            )
        if self.method == "ngram":
            self._check_ngram()
        if self.method == "suffix":
            self._check_suffix()

    def _check_ngram(self) -> None:
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            least, most = LOOKUP_MIN, LOOKUP_MAX
        least, most = most if least is None else least, least if most is None else most
        _require_int("prompt_lookup_min", least, 1, MAX_LOOKUP)
        _require_int("prompt_lookup_max", most, 1, MAX_LOOKUP)
        assert least is not None and most is not None
        if least > most:
            raise ValueError(f"speculative_config: prompt_lookup_min={least} must not exceed prompt_lookup_max={most}")
        object.__setattr__(self, "prompt_lookup_min", least)
        object.__setattr__(self, "prompt_lookup_max", most)

    def _check_suffix(self) -> None:
        for name, default in OF_METHOD["suffix"].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        _require_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, MAX_TREE_DEPTH)
        _require_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, MAX_CACHED_REQUESTS)
        _require_real("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, float(MAX_DRAFTS))
        _require_real("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)

    def check_length(self, max_model_len: int) -> None:
        """ValueError if no request of at most so many tokens has room for all drafts: behind a token of a prompt, one that was
        sampled, and before the one behind them."""
        if self.num_speculative_tokens > max_model_len - 3:
            raise ValueError(
                f"speculative_config: num_speculative_tokens={self.num_speculative_tokens} drafts never fit a request of "
                f"max_model_len={max_model_len} tokens: draft {max(0, max_model_len - 3)} at most, or raise max_model_len"
            )

    @property
    def drafts_on_host(self) -> bool:
        """Whether the host makes the drafts, from tokens that it knows: steps then do not overlap."""
        return self.method == "suffix"

    @property
    def by_model(self) -> bool:
        """Whether a checkpoint of its own makes the drafts: each costs device time, whether it is verified or not."""
        return self.method in BY_MODEL

    @property
    def keeps_pages(self) -> bool:
        """Whether what drafts attends, and keeps KV beside the target's."""
        return self.method in WITH_PAGES

    @classmethod
    def make(cls, given: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """From itself, from a dict of its fields, or from such a dict as JSON text. ValueError names an unknown field."""
        if isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"speculative_config={given!r} is not JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config={given!r} must be a dict of its fields")
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in given if name not in known)
        if unknown:
            raise ValueError(f"speculative_config has unknown fields {', '.join(unknown)}; it may have {', '.join(known)}")
        if "num_speculative_tokens" not in given:
            raise ValueError("speculative_config needs num_speculative_tokens: most drafts a sequence and step")
        return cls(**{name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()})


def _require_int(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"speculative_config: {name}={value!r} must be an integer in [{least}, {most}]")


def _require_real(name: str, value: Any, least: float, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"speculative_config: {name}={value!r} must be a number in [{least:g}, {most:g}]")
