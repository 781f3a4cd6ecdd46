"""What the option kv_store says: which tiers a store has, nearest first, and how much each may hold.

Owns the option's grammar.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from dataclasses import dataclass

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(" + "|".join(_UNITS) + ")")
KINDS = ("host", "nixl", "mooncake", "disk")  # nearest first
PEERS = ("nixl", "mooncake")  # whose pages other engines read, at addresses
FORMS = (
    "'host:SIZE', 'nixl:HOST:PORT[+HOST:PORT...]:SIZE', 'mooncake:' likewise, 'disk:FOLDER:SIZE', or some of them in this order "
    "with commas between them, with sizes such as 4GiB"
)


@dataclass(frozen=True)
class TierSpec:
    """One tier. kind: of KINDS. max_bytes: of KV that it holds at most. place: the folder of a disk tier; of a tier of PEERS the
    address where it listens, then those of other engines, with a "+" before each."""

    kind: str
    max_bytes: int
    place: str = ""


def parse_kv_store(text: object) -> tuple[TierSpec, ...]:
    """The tiers that the option names. ValueError says what it may be."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"kv_store={text!r} must be {FORMS}")
    tiers = tuple(_parse_tier(part, text) for part in text.split(","))
    kinds = [tier.kind for tier in tiers]
    if kinds != [kind for kind in KINDS if kind in kinds]:
        raise ValueError(f"kv_store={text!r} must have at most one tier of each kind, in the order {', '.join(KINDS)}")
    return tiers


def outlives_process(text: str) -> bool:
    """Whether other processes can find what this store keeps, so that the weights need a name. ValueError as `parse_kv_store`."""
    return any(tier.kind != "host" for tier in parse_kv_store(text))


def _parse_tier(part: str, text: str) -> TierSpec:
    kind, _, rest = part.partition(":")
    place, _, size = rest.rpartition(":")
    found = _SIZE.fullmatch(size)
    if found is None or kind not in KINDS or bool(place) != (kind != "host"):
        raise ValueError(f"kv_store={text!r}: {part!r} must be {FORMS}")
    if kind in PEERS:
        _check_addresses(kind, place, part, text)
    max_bytes = int(float(found[1]) * _UNITS[found[2]])
    if not max_bytes:
        raise ValueError(f"kv_store={text!r}: {part!r} holds nothing; give it more than 0 bytes")
    return TierSpec(kind, max_bytes, place)


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[host]:port". ValueError if it is no such thing."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host, int(port)


def _check_addresses(kind: str, place: str, part: str, text: str) -> None:
    addresses = place.split("+")
    for address in addresses:
        try:
            parse_address(address)
        except ValueError as error:
            raise ValueError(f"kv_store={text!r}: {part!r}: {error}") from None
    twice = [address for address, count in Counter(addresses).items() if count > 1]
    if twice:
        raise ValueError(f"kv_store={text!r}: {part!r} has {twice[0]!r} twice; the first address is this engine's own")
    if kind == "mooncake" and _is_unspecified(parse_address(addresses[0])[0]):
        raise ValueError(
            f"kv_store={text!r}: {part!r}: other engines are told the address {addresses[0]!r} and could not read there: give "
            "one of this machine's by which they reach it"
        )


def _is_unspecified(host: str) -> bool:
    """Whether it is where one listens at all of a machine's addresses: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False
