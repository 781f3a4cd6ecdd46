"""From logits to tokens and log-probabilities: the host half (rows of parameters) beside the device half."""

from typing import TYPE_CHECKING

from jaxserve.moved import forward

if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
