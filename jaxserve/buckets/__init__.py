"""The shapes that steps run in.

plan: BucketPlan, the fixed set that is compiled. padding: what padding to them cost. unpadded: a plan in which every step has its
own shape, for simulations of engines that don't pad.
"""

from typing import TYPE_CHECKING

from jaxserve.moved import forward

if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
