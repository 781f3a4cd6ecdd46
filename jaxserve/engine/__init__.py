"""Token ids in, token ids out: the loop of schedule, pack, dispatch, fetch, update."""

from typing import TYPE_CHECKING

from jaxserve.moved import forward

if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
