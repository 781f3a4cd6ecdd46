"""Structured output: the compilation of a form (grammars), and the masks of a step (masks)."""
