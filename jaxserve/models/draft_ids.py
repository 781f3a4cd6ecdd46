"""The tokens that a head which drafts knows, where they are a part of its target's vocabulary."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def add_draft_ids(loaded: dict[str, Any], ids: np.ndarray) -> None:
    """Adds `draft_ids` to a head's weights by path. ids: i32[n], the target's id of each column of its `lm_head` kernels.

    The columns are put into the vocabulary's order where a checkpoint has another: drafts are chosen among them as tokens are among
    all of the vocabulary.
    """
    order = np.argsort(ids)
    if (order != np.arange(len(ids))).any():
        for path in [path for path in loaded if path.endswith("lm_head/kernel")]:
            loaded[path] = loaded[path][:, order]
    loaded["draft_ids"] = jnp.asarray(ids[order])
