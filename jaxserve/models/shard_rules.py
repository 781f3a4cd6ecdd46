"""Which weight of `Decoder` is cut over devices in which way: one table, from which loading, updates, sleep and memory all work.

The paths are `Decoder`'s, kernels [in, out] or transposed weights [out, in]. What a rule means in numbers is models/shards.py's.

  qkv         a device has whole query heads and the key and value heads that they read: columns of each, fused
  gate_up     the same columns of gate and of up, fused
  row         the rows that belong to the device's heads or columns; results are summed over devices
  output      in place of row where sums must be whole: columns, and all rows; results are put side by side
  experts     whole experts; results are summed over devices
  vocab       entries of the vocabulary
  replicated  every device has all of it
"""

from __future__ import annotations

import re
from typing import Literal

Rule = Literal["qkv", "gate_up", "row", "output", "experts", "vocab", "replicated"]

_LAYER = r"layers/\d+"
# (a path, how many axes the weight has where that matters, the rule); patterns match in full, tried in order.
RULES: tuple[tuple[str, int | None, Rule], ...] = (
    (r"embed_tokens/embedding", None, "vocab"),
    (r"lm_head/(kernel|weight)", None, "vocab"),
    (_LAYER + r"/attention/qkv_proj/(kernel|weight|bias)", None, "qkv"),
    (_LAYER + r"/attention/o_proj/(kernel|weight)", None, "row"),
    (_LAYER + r"/mlp/(gate_up|down)_proj/kernel", 3, "experts"),
    (_LAYER + r"/mlp/gate_up_proj/(kernel|weight|bias)", None, "gate_up"),
    (_LAYER + r"/mlp/down_proj/(kernel|weight)", None, "row"),
    (_LAYER + r"/(attention/o_proj|mlp/down_proj)/bias", None, "replicated"),  # added once, after the sum
    (_LAYER + r"/mlp/router/kernel", None, "replicated"),
    (r".*norm/scale", None, "replicated"),
)
_COMPILED: list[tuple[re.Pattern[str], int | None, Rule]] = [(re.compile(path), axes, rule) for path, axes, rule in RULES]


def rule_of(path: str, num_axes: int, *, whole_sums: bool = False) -> Rule:
    """The rule of a weight. whole_sums: as `Shard`'s. KeyError for a path that the table does not have: a new kind of weight needs
    a row."""
    for pattern, axes, rule in _COMPILED:
        if axes in (None, num_axes) and pattern.fullmatch(path):
            return "output" if rule == "row" and whole_sums else rule
    raise KeyError(f"no rule says how {path} is cut over devices")
