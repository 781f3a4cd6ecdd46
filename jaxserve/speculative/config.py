"""What a user asks of speculation: vLLM's names, checked. Knows no model, plan or device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("ngram",)
ACCEPTANCES = ("sampled", "rejection")
LOOKUP_MIN, LOOKUP_MAX = 1, 3  # where neither is given; vLLM's 5 and 5 found too little, and drafts that lose are not verified
MAX_DRAFTS, MAX_LOOKUP = 64, 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and which of them stand.

    method: "ngram": what followed the most recent earlier occurrence of the last tokens (prompt lookup).
    num_speculative_tokens: most drafts a sequence and step.
    prompt_lookup_min, prompt_lookup_max: tokens that must recur; the longest is tried first. One alone is both; 1 and 3 if neither
      is given.
    acceptance: "sampled": at each position the token is drawn that would have been drawn without drafts, and a draft stands if it
      is that one: the output does not depend on drafting. "rejection": rejection sampling (Leviathan et al., ICML 2023): the output
      is distributed alike, but which tokens are drawn depends on the drafts. N-gram drafts are accepted equally often under both.
    adaptive: as many drafts as pay, by the acceptance and the times of steps so far: while requests queue for a row, as many as
      give the most tokens a second, else as many as give the least time per token, averaged over the rows; none where they lose, on
      a few rows or on all. Otherwise always num_speculative_tokens.

    Raises:
      ValueError: a value that is missing, of the wrong type, or out of range.
    """

    method: str = "ngram"
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    acceptance: str = "sampled"
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative_config: method={self.method!r} must be one of {', '.join(METHODS)}")
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"speculative_config: acceptance={self.acceptance!r} must be one of {', '.join(ACCEPTANCES)}")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"speculative_config: adaptive={self.adaptive!r} must be True or False")
        _require_int("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            least, most = LOOKUP_MIN, LOOKUP_MAX
        least, most = most if least is None else least, least if most is None else most
        _require_int("prompt_lookup_min", least, MAX_LOOKUP)
        _require_int("prompt_lookup_max", most, MAX_LOOKUP)
        assert least is not None and most is not None
        if least > most:
            raise ValueError(f"speculative_config: prompt_lookup_min={least} must not exceed prompt_lookup_max={most}")
        object.__setattr__(self, "prompt_lookup_min", least)
        object.__setattr__(self, "prompt_lookup_max", most)

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
        return cls(**given)


def _require_int(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"speculative_config: {name}={value!r} must be an integer in [1, {most}]")
