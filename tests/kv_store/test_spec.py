"""The option kv_store."""

import pytest

from jaxserve import EngineConfig
from jaxserve.kv_store.spec import TierSpec, parse_address, parse_kv_store


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("host:4GiB", [TierSpec("host", 4 << 30)]),
        ("host:1.5MB", [TierSpec("host", 1_500_000)]),
        ("disk:/a:b/c:2TiB", [TierSpec("disk", 2 << 40, "/a:b/c")]),
        ("nixl:10.0.0.1:9100:4GiB", [TierSpec("nixl", 4 << 30, "10.0.0.1:9100")]),
        ("host:7B,nixl:[::1]:0+b:2:1KiB", [TierSpec("host", 7), TierSpec("nixl", 1024, "[::1]:0+b:2")]),
        ("nixl:a:1:1KiB,mooncake:a:2+b:2:1KiB", [TierSpec("nixl", 1024, "a:1"), TierSpec("mooncake", 1024, "a:2+b:2")]),
        ("host:7B,disk:kv:1KiB", [TierSpec("host", 7), TierSpec("disk", 1024, "kv")]),
    ],
)
def test_tiers_are_read(text, tiers):
    assert parse_kv_store(text) == tuple(tiers)
    assert EngineConfig(kv_store=text).kv_store == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "host:4", "host:4gib", "host:-1GiB", "host:0GiB", "host:/x:1GiB", "disk:1GiB", "disk::1GiB", "tape:1GiB"]
    + [
        "nixl:1GiB",
        "nixl:a:1GiB",
        "nixl::1:1GiB",
        "nixl:a:65536:1GiB",
        "nixl:a:1+:1GiB",
        "nixl:a:1+b:2+a:1:1GiB",
        "mooncake:a:1GiB",
        "mooncake:1GiB",
    ]
    + ["disk:/x:1GiB,nixl:a:1:1GiB", "host:1GiB,host:1GiB", "disk:/x:1GiB,host:1GiB", "host:1GiB,", 7],
)
def test_what_is_no_tier_is_named(text):
    with pytest.raises(ValueError, match="kv_store="):
        EngineConfig(kv_store=text)


def test_an_address_is_read_and_what_is_none_is_named():
    assert parse_address("[::1]:9100") == ("::1", 9100) and parse_address("a.b:0") == ("a.b", 0)
    with pytest.raises(ValueError, match=r"'nixl:a:1\+b:1GiB': 'b' is no HOST:PORT"):
        parse_kv_store("nixl:a:1+b:1GiB")


@pytest.mark.parametrize("own", ["0.0.0.0", "[::]", "::"])
def test_mooncakes_own_address_is_one_that_others_reach(own):
    """They are told it, and read there. NIXL tells them its own way."""
    with pytest.raises(ValueError, match="give one of this machine's by which they reach it"):
        parse_kv_store(f"host:1MiB,mooncake:{own}:9100+b:9100:1GiB")
    assert parse_kv_store(f"nixl:{own}:9100:1GiB") and parse_kv_store("mooncake:localhost:0:1GiB")


def test_pages_are_kept_by_the_hashes_of_the_prefix_cache():
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        EngineConfig(kv_store="host:1GiB", enable_prefix_caching=False)
