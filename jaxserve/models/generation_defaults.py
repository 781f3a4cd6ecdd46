"""What a checkpoint's makers recommend for generating with it: `GenerationDefaults`, from generation_config.json.

Only reads: whether the recommendations are used, and over what a request asks for, is the caller's decision. Knows
nothing of jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.models.config import read_json, token_ids

# Keys of transformers' GenerationConfig that change which tokens come out and are not taken from a file, as vLLM takes none of them
# (what some ask for, SamplingParams can say), with the values that leave the output alone besides null, false and empty.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "typical_p": (1.0,),
    "top_h": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": (),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Token ids that end, begin and pad a sequence, and recommended sampling; None where the checkpoint says nothing.

    eos_token_ids holds every id that ends a sequence (Qwen3 has two), in the file's order. not_applied names what the
    file asks for and is not taken from it, so that a caller can say so. max_length is not read: the engine bounds
    lengths itself.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    not_applied: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, folder: str | Path) -> "GenerationDefaults":
        """Reads generation_config.json of a checkpoint's folder; token ids that it lacks come from config.json.

        Either file may be missing; what neither says is None, or no eos at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"no checkpoint folder {folder}")
        paths = (folder / "generation_config.json", folder / "config.json")
        return cls.from_dicts(*(read_json(path, path.name) if path.exists() else {} for path in paths))

    @classmethod
    def from_dicts(cls, generation: Mapping[str, Any], config: Mapping[str, Any]) -> "GenerationDefaults":
        """The same from the contents of generation_config.json and config.json."""

        def token_id(name: str) -> Any:
            return generation[name] if generation.get(name) is not None else config.get(name)

        def is_asked_for(key: str, neutral: tuple[Any, ...]) -> bool:
            return bool(generation.get(key)) and generation[key] not in neutral

        plain = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
        return cls(
            eos_token_ids=token_ids(token_id("eos_token_id")),
            bos_token_id=token_id("bos_token_id"),
            pad_token_id=token_id("pad_token_id"),
            not_applied=tuple(key for key, neutral in _NOT_APPLIED.items() if is_asked_for(key, neutral)),
            **{name: generation.get(name) for name in plain},
        )

    def sampling(self) -> dict[str, Any]:
        """The recommendations as arguments of `SamplingParams`, only those that the checkpoint makes.

        do_sample=false is temperature 0, and then temperature, top_k, top_p and min_p mean nothing. Where do_sample is
        missing, the values count as they stand.
        """
        values = {"repetition_penalty": self.repetition_penalty, "max_tokens": self.max_new_tokens}
        if self.do_sample is False:
            values["temperature"] = 0.0
        else:
            values |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in values.items() if value is not None}
