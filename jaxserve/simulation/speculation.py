"""What speculation would gain on a GPU: from how many drafts stand, and from what steps and drafts take there.

Owns the formula of Leviathan et al. (2211.17192, section 3) with the simulator's own step times in the place of one cost for all
batches, and what a pass of each kind of draft takes. Steady decodes alone: every sequence has as many drafts, and all decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.buckets.plan import Bucket
from jaxserve.step_times.analytic import AnalyticStepTimes, Deployment
from jaxserve.step_times.model_shapes import MODELS
from jaxserve.step_times.operators import matmul_seconds

DRAFT_VOCAB = 32_000  # tokens that published EAGLE-3 heads for models of 8B know
HEADS = ("ngram", "eagle3", "medusa")  # what drafts and is no model with a shape of its own


def expected_tokens(shares: Sequence[float]) -> float:
    """Tokens that a step brings on average. shares: of chains whose first draft stands, whose first two do, and so on. Where each
    draft stands at a rate a, (1 - a^(k + 1)) / (1 - a): equation 1 of 2211.17192."""
    return 1.0 + sum(shares)


def improvement(acceptance: float, num_drafts: int, cost: float) -> float:
    """Theorem 3.8 of 2211.17192: the factor of walltime where a draft costs `cost` of a step, and verifying costs nothing."""
    return expected_tokens(shares_of(acceptance, num_drafts)) / (num_drafts * cost + 1)


def shares_of(acceptance: float, num_drafts: int) -> list[float]:
    """Of chains each of whose drafts stands at one rate, whatever came before. ValueError if that is no rate."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} must lie in [0, 1]")
    return [acceptance ** (j + 1) for j in range(num_drafts)]


@dataclass(frozen=True)
class Speedup:
    """Of one number of sequences and drafts. Seconds on the device: of a step without drafts, of one that verifies them, and of
    what makes them, all drafts of all sequences."""

    batch: int
    num_drafts: int  # that a sequence verifies
    plain_seconds: float
    verify_seconds: float
    draft_seconds: float
    tokens: float  # of a sequence and step

    @property
    def factor(self) -> float:
        """Output tokens a second, over those without drafts."""
        return self.tokens * self.plain_seconds / (self.verify_seconds + self.draft_seconds)


def predict(
    deployment: Deployment,
    drafts_by: str,
    batch: int,
    context_len: int,
    shares: Sequence[float],
    widths: Sequence[int] | None = None,
) -> Speedup:
    """What chains of len(shares) drafts would gain, or trees. drafts_by: one of HEADS, or a known model's name. context_len: tokens
    of each sequence, on average. shares: as `expected_tokens`. widths: of trees the candidates at each depth; None: one, a chain.

    Raises:
      ValueError: an unknown name, numbers out of range, shares that grow, or a deployment of several stages.
    """
    widths = [1] * len(shares) if widths is None else widths
    if batch < 1 or context_len < 1 or not shares:
        raise ValueError(f"{batch=} and {context_len=} must be at least 1, and there must be drafts")
    if list(shares) != sorted(shares, reverse=True) or not 0 <= shares[-1] <= shares[0] <= 1:
        raise ValueError(f"shares={list(shares)} must lie in [0, 1], none larger than the one before: each is of longer chains")
    if len(widths) != len(shares) or min(widths) < 1:
        raise ValueError(f"widths={list(widths)} must be {len(shares)} integers of at least 1, one for each of shares")
    target, k = deployment.step_times(), sum(widths)
    return Speedup(
        batch,
        k,
        _decode_seconds(target, batch, 1, context_len),
        _decode_seconds(target, batch, 1 + k, context_len),
        _draft_seconds(deployment, drafts_by, batch, context_len, widths),
        expected_tokens(shares),
    )


def _decode_seconds(times: AnalyticStepTimes, batch: int, rows: int, context_len: int) -> float:
    """A step of decodes with so many rows each, which read their sequence's KV once."""
    read = batch * (context_len if times.window is None else min(context_len, times.window))
    return times.seconds(Bucket(batch * rows, batch, rows), batch * rows, read, 0)


def _draft_seconds(deployment: Deployment, drafts_by: str, batch: int, context_len: int, widths: Sequence[int]) -> float:
    """A pass for each depth, over the rows of its candidates."""
    if drafts_by == "ngram":
        return 0.0
    m, gpu, tp, k = deployment.model, deployment.gpu, deployment.tp, sum(widths)
    if drafts_by == "medusa":  # a block and a matrix to logits for each depth, and the drafts chosen, in the head's program
        head = deployment.step_times()
        return len(widths) * (matmul_seconds(gpu, batch, m.hidden_size, m.hidden_size) + head.head_seconds(batch))
    if drafts_by == "eagle3":
        qkv = (m.num_heads // tp + 2 * deployment.kv_heads) * m.head_dim
        shape = replace(m, name=f"{m.name}-eagle3", num_layers=1, vocab_size=min(DRAFT_VOCAB, m.vocab_size), window=None)

        def of_head(rows: int) -> float:  # twice as many columns into its projections as a layer has
            return matmul_seconds(gpu, rows, qkv, 2 * m.hidden_size) - matmul_seconds(gpu, rows, qkv, m.hidden_size)

        body_alone = matmul_seconds(gpu, batch * (1 + k), m.hidden_size, 3 * m.hidden_size)  # three states joined to one
    elif drafts_by in MODELS:
        shape, body_alone = MODELS[drafts_by], 0.0

        def of_head(rows: int) -> float:
            return 0.0
    else:
        raise ValueError(f"drafts_by={drafts_by!r} must be one of {', '.join((*HEADS, *MODELS))}")
    draft = replace(deployment, model=shape).step_times()
    read = batch * (context_len if draft.window is None else min(context_len, draft.window))
    tokens = batch * (1 + k)
    body = float(draft.body_seconds(Bucket(tokens, batch, 1 + k), read, 0)) + of_head(tokens) + body_alone
    return body + sum(_decode_seconds(draft, batch, width, context_len) + of_head(batch * width) for width in widths)
