"""write_kv: every token at its slot, nothing anywhere else, no copy of a donated cache, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.kv_cache import write_kv

OPTIMISED = True

NUM_PAGES, K, PAGE_SIZE, H = 6, 3, 4, 8
T = 9


def tokens(dtype="float32"):
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((NUM_PAGES, 2, K, PAGE_SIZE, H)).astype(dtype)
    k, v = rng.standard_normal((2, T, K, H)).astype(dtype)
    slots = rng.permutation(NUM_PAGES * PAGE_SIZE)[:T].astype(np.int32)
    slots[0] = NUM_PAGES * PAGE_SIZE - 1  # the very last slot, which a padding slot of -1 would hit
    slots[[2, T - 1]] = NUM_PAGES * PAGE_SIZE + np.array([2, T - 1])  # padding, at the end and in between
    slots[3] = 1 if 0 not in slots[1:] else slots[3]
    assert len(set(slots.tolist())) == T
    return pages, k, v, slots


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
def test_each_token_at_its_slot_and_nothing_else(dtype):
    pages, k, v, slots = tokens(dtype)
    want = pages.copy()
    for t, slot in enumerate(slots):
        if slot < NUM_PAGES * PAGE_SIZE:
            want[slot // PAGE_SIZE, 0, :, slot % PAGE_SIZE] = k[t]
            want[slot // PAGE_SIZE, 1, :, slot % PAGE_SIZE] = v[t]
    np.testing.assert_array_equal(jax.jit(write_kv)(pages, k, v, slots), want)


def test_all_padding_writes_nothing():
    pages, k, v, _ = tokens()
    slots = NUM_PAGES * PAGE_SIZE + np.arange(T, dtype=np.int32)
    np.testing.assert_array_equal(write_kv(jnp.asarray(pages), k, v, jnp.asarray(slots)), pages)


def test_converts_to_the_caches_dtype():
    pages, k, v, slots = tokens()
    out = write_kv(jnp.asarray(pages, jnp.bfloat16), k, v, jnp.asarray(slots))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[-1, 0, :, -1], k[0].astype(jnp.bfloat16))


def test_donated_cache_is_not_copied():
    pages, k, v, slots = (jnp.asarray(x) for x in tokens())
    pages = jnp.concatenate([pages] * 500)  # large beside everything else
    compiled = jax.jit(write_kv, donate_argnums=0).lower(pages, k, v, slots).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_pages": jnp.zeros((NUM_PAGES, 1, K, PAGE_SIZE, H))}, r"kv_pages is .*; must be \[num_pages, 2, K, page_size, H\]"),
        ({"kv_pages": jnp.zeros((NUM_PAGES, K, PAGE_SIZE, H))}, r"kv_pages is .*; must be \[num_pages, 2, K, page_size, H\]"),
        ({"k": jnp.zeros((T, K + 1, H))}, rf"k is float32\({T}, {K + 1}, {H}\); must be \[T, K, H\] with K={K} and H={H}"),
        ({"k": jnp.zeros((T, H))}, r"k is float32\(\d+, \d+\); must be \[T, K, H\]"),
        ({"v": jnp.zeros((T + 1, K, H))}, rf"v is float32\({T + 1}, .*must be \[T, K, H\] with .*T={T}"),
        ({"slot_mapping": jnp.zeros(T + 1, jnp.int32)}, "slot_mapping is int32"),
        ({"slot_mapping": jnp.zeros(T)}, "slot_mapping is float32"),
    ],
)
def test_callers_mistakes_are_value_errors(changes, message):
    pages, k, v, slots = (jnp.asarray(x) for x in tokens())
    with pytest.raises(ValueError, match=message):
        write_kv(**{**{"kv_pages": pages, "k": k, "v": v, "slot_mapping": slots}, **changes})
