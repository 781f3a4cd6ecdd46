"""Structured output: what a user may ask for (params), its compilation (grammars), and the masks of a step (masks)."""

from jaxserve.structured_outputs import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
