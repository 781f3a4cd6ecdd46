"""The fixed shapes that steps run in."""

from typing import TYPE_CHECKING

from jaxserve.moved import forward

if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
