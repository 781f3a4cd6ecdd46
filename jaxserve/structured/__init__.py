"""Structured output: the compilation of a form (grammars), and the masks of a step (masks)."""

from typing import TYPE_CHECKING

from jaxserve.moved import forward

if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
