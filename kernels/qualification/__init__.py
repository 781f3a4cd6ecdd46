"""Whether our kernels compute what they should on the card at hand: what is tried, in which order, and against what.

`plan` says what is left to try (standard library alone), `attention`, `rotary_write` and `grouped_matmul` have the batches and
compare with the reference, `checks` runs one unit, and `python -m kernels.qualification PLAN` tries all of a plan. Knows nothing of
cache folders, limits of time or who asks: jaxserve/qualification starts this as a process of its own, which it may kill.
"""
