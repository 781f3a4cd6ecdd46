"""What the option kv_store says: which tiers a store has, nearest first, and how much each may hold.

Owns the option's grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(" + "|".join(_UNITS) + ")")
FORMS = "'host:SIZE', 'disk:FOLDER:SIZE', or both with a comma between them, with sizes such as 4GiB"


@dataclass(frozen=True)
class TierSpec:
    """One tier. kind: "host" or "disk". max_bytes: of KV that it holds at most. folder: of a disk tier."""

    kind: str
    max_bytes: int
    folder: str = ""


def parse_kv_store(text: object) -> tuple[TierSpec, ...]:
    """The tiers that the option names. ValueError says what it may be."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"kv_store={text!r} must be {FORMS}")
    tiers = tuple(_parse_tier(part, text) for part in text.split(","))
    if [tier.kind for tier in tiers] not in (["host"], ["disk"], ["host", "disk"]):
        raise ValueError(f"kv_store={text!r} must be one host tier, one disk tier, or a host tier before a disk tier")
    return tiers


def outlives_process(text: str) -> bool:
    """Whether other processes can find what this store keeps, so that the weights need a name. ValueError as `parse_kv_store`."""
    return any(tier.kind == "disk" for tier in parse_kv_store(text))


def _parse_tier(part: str, text: str) -> TierSpec:
    kind, _, rest = part.partition(":")
    folder, _, size = rest.rpartition(":")
    found = _SIZE.fullmatch(size)
    if found is None or kind not in ("host", "disk") or bool(folder) != (kind == "disk"):
        raise ValueError(f"kv_store={text!r}: {part!r} must be {FORMS}")
    max_bytes = int(float(found[1]) * _UNITS[found[2]])
    if not max_bytes:
        raise ValueError(f"kv_store={text!r}: {part!r} holds nothing; give it more than 0 bytes")
    return TierSpec(kind, max_bytes, folder)
