"""Whether a request's own parameters leave any token at the present end of its output, and which of them leave none.

Owns the host's side of the masks: what those of sampler.py and logit_edits.py come to on the device. It is asked where a request
begins and where a row has no finite logit, never in a step that goes well. logit_bias forbids nothing: it is finite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams

_NUM_NAMED = 5  # token ids in a message


class NothingAllowedError(ValueError):
    """A request's own parameters forbid every token at some place of its output. `names` are the parameters, the first of `args`,
    so that the error can be pickled."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.args[0]

    def __str__(self) -> str:
        names, num_output, without, ids = self.args
        *most, last = names
        said = f"{', '.join(most)} and {last} together forbid" if most else f"{last} forbids"
        place = f"after {num_output} tokens of the output" if num_output else "at the beginning of the output"
        named = f"token ids {', '.join(map(str, ids))}" + (" and others" if len(ids) == _NUM_NAMED else "")
        return f"{said} every token {place}. Without {without} {named} could follow: leave it out, or change it"


def forbids(params: SamplingParams) -> bool:
    """Whether any of the parameters, beside a form, may forbid tokens."""
    return bool(params.allowed_token_ids is not None or params.bad_words_token_ids is not None or params.min_tokens)


def why_nothing(request: Request, vocab_size: int, mask: np.ndarray | None = None) -> NothingAllowedError | None:
    """The error of a request after whose output, as far as the host knows it, no token may follow; None where one may.

    mask: i32[ceil(V / 32)], a bit a token: what its form allows there; None: it has no form.
    """
    allowed = _allowed(request, vocab_size, mask)
    if _common(allowed, vocab_size).any():
        return None
    others = {name: _common({n: x for n, x in allowed.items() if n != name}, vocab_size) for name in allowed}
    decisive = [name for name, left in others.items() if left.any()]
    if decisive:
        ids = np.flatnonzero(others[decisive[0]])[:_NUM_NAMED].tolist()
        return NothingAllowedError(tuple(decisive), request.num_output_tokens, decisive[0], ids)
    every = " and ".join(allowed)  # no single one is to blame
    return NothingAllowedError(tuple(allowed), request.num_output_tokens, every, list(range(min(_NUM_NAMED, vocab_size))))


def check_something(request: Request, vocab_size: int, mask: np.ndarray | None = None) -> None:
    """Raises NothingAllowedError for a request that nothing may follow. Arguments as `why_nothing`'s."""
    error = why_nothing(request, vocab_size, mask) if forbids(request.params) else None
    if error is not None:
        raise error


def _common(allowed: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:  # bool[V]
    return np.logical_and.reduce([np.ones(vocab_size, bool), *allowed.values()])


def _allowed(request: Request, vocab_size: int, mask: np.ndarray | None) -> dict[str, np.ndarray]:  # bool[V] each
    """What each parameter that forbids tokens leaves as the next one, under the name that its caller knows it by."""
    params, output = request.params, tuple(request.output_token_ids)
    found = {}
    if params.allowed_token_ids is not None:
        found["allowed_token_ids"] = ~_but(params.allowed_token_ids, vocab_size)
    last = [word[-1] for word in params.bad_words_token_ids or () if len(word) == 1 or output[1 - len(word) :] == word[:-1]]
    if last:
        found["bad_words"] = _but(last, vocab_size)
    if len(output) < params.min_tokens and request.stop_ids:
        found["min_tokens"] = _but(request.stop_ids, vocab_size)
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        found["structured_outputs"] = bits[:vocab_size].astype(bool)
    return found


def _but(ids: Collection[int], vocab_size: int) -> np.ndarray:  # bool[V]
    """All tokens but these. The eos ids of a model may lie outside its vocabulary: the device drops such ids."""
    others = np.ones(vocab_size, bool)
    others[[i for i in ids if 0 <= i < vocab_size]] = False
    return others
