"""What who chooses a replica knows of its load: what it said, and what it was sent since."""

from jaxserve.ray.loads import STALE_SECONDS, Loads
from jaxserve.routing.policy import Load


def test_what_was_said_and_what_was_sent_since():
    loads = Loads()
    assert loads.of(["a"], 0.0) == {"a": Load()}, "nothing is known yet"
    loads.send("a", 0.0)
    assert loads.hear({"a": Load(2, 3), "b": Load()}) == set()
    loads.send("a", 1.0)
    assert loads.of(["a", "b"], 1.0) == {"a": Load(2, 5), "b": Load()}
    assert loads.of(["a"], STALE_SECONDS) == {"a": Load(2, 4)}, "the first one is long in what was said"
    assert loads.of(["a"], 1.0 + STALE_SECONDS) == {"a": Load(2, 3)}


def test_a_replica_that_is_gone_is_forgotten():
    loads = Loads()
    loads.hear({"a": Load(1, 1), "b": Load(1, 1)})
    loads.send("b", 0.0)
    assert loads.hear({"a": Load()}) == {"b"}
    assert loads.hear({"a": Load(), "b": Load()}) == set()
    assert loads.of(["a", "b"], 0.0) == {"a": Load(), "b": Load()}
