"""Backends that are not plain XLA as far as the tables know, so that a CPU can be asked about them as a card is about ours.

For attention "auto" prefers "bent", which is wrong, to "right"; for grouped matmuls there is "twin". Imports no jax.
"""

from kernels.backends import ATTENTION, GROUPED_MATMUL, Backend

ROWS = {
    "right": Backend("right", "kernels.ragged_paged_attention.xla", automatic=True, platforms=("cpu",)),
    "bent": Backend("bent", "tests.qualification.bent", automatic=True, platforms=("cpu",)),
}
GROUPED_ROWS = {"twin": Backend("twin", "kernels.grouped_matmul.xla", automatic=True, platforms=("cpu",))}


def install() -> None:
    """Into this process's tables."""
    ATTENTION.rows.update(ROWS)
    GROUPED_MATMUL.rows.update(GROUPED_ROWS)
