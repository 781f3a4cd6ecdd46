"""Where responses are kept: the bounds hold, in memory and in a file, against a plain list of what was last used."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.serving.dialects.response_store import MemoryStore, SQLiteStore, StoredResponse, open_store


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"x" * (size // 2), b"y" * (size - size // 2))


@pytest.fixture(params=["memory", "sqlite"])
def make(request, tmp_path):
    return lambda most, size: open_store(None if request.param == "memory" else str(tmp_path / "r.sqlite"), most, size)


def test_the_least_recently_used_goes_first(make):
    store = make(2, 100)
    assert store.put("a", stored(10)) and store.put("b", stored(10))
    assert store.get("a") == stored(10)
    assert store.put("c", stored(10))
    assert store.get("b") is None and store.get("a") and store.get("c")
    assert store.delete("a") and not store.delete("a") and store.get("a") is None
    store.close()


def test_bytes_are_bounded(make):
    store = make(10, 100)
    assert not store.put("large", stored(101)) and store.get("large") is None
    assert all(store.put(name, stored(40)) for name in "abc")
    assert store.get("a") is None and store.num_bytes == 80
    assert store.put("b", stored(60)) and store.num_bytes == 100 and len(store) == 2, "one of the same name is replaced"
    store.close()


def test_nothing_is_kept_where_nothing_may_be(make):
    for most, size in ((0, 100), (10, 0)):
        store = make(most, size)
        assert not store.put("a", stored(10)) and store.get("a") is None and len(store) == 0
        store.close()


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "delete"]), st.sampled_from("abcd"), st.integers(0, 50)),
        min_size=20,
        max_size=40,
    )
)
def test_both_stores_are_a_list_of_what_was_last_used(history):
    stores = [MemoryStore(3, 100), SQLiteStore(":memory:", 3, 100)]
    model: dict[str, int] = {}  # by last use
    for what, name, size in history:
        if what == "put":
            model.pop(name, None)
            model[name] = size
            while len(model) > 3 or sum(model.values()) > 100:
                del model[next(iter(model))]
        elif what == "get" and name in model:
            model[name] = model.pop(name)
        elif what == "delete":
            model.pop(name, None)
        for store in stores:
            if what == "put":
                assert store.put(name, stored(size))
            elif what == "get":
                assert store.get(name) == (stored(model[name]) if name in model else None)
            else:
                store.delete(name)
            assert (len(store), store.num_bytes) == (len(model), sum(model.values()))
    for store in stores:
        store.close()


def test_a_file_is_found_again_and_cut_to_smaller_bounds(tmp_path):
    path = str(tmp_path / "r.sqlite")
    store = SQLiteStore(path, 10, 100)
    for name in "abc":
        store.put(name, stored(30))
    store.get("a")
    store.close()
    store = SQLiteStore(path, 2, 100)
    assert store.get("b") is None and store.get("a") == store.get("c") == stored(30)
    store.close()


def test_a_file_that_is_no_store(tmp_path):
    (tmp_path / "text").write_text("no database at all" * 100)
    with pytest.raises(ValueError, match="response_store="):
        open_store(str(tmp_path / "text"), 1, 1)
    with pytest.raises(ValueError, match="response_store="):
        open_store(str(tmp_path / "no" / "folder"), 1, 1)
