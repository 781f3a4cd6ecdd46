import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models import Decoder, ModelConfig, named_leaves, random_params, transpose_kernels, with_leaves
from jaxserve.models.config import RopeConfig
from kernels.kv_cache import write_kv
from kernels.ragged_paged_attention import ragged_paged_attention
from tests.goldens.golden import ATOL, NAMES
from tests.models.weight_counts import num_weights
from tests.selection import slow_unless

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    sliding_windows=(None,) * 3,
    qk_norm=True,
)


@nnx.jit
def forward(model, tokens):
    return model(tokens)


def padded(rows):
    """i32[B, longest]: causal, so that what stands behind a row's end can't change it."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_plain_forward_matches_transformers(load_model, name):
    """Logits of the prompts, and the greedy continuations: fed whole, each of their tokens must pick the next."""
    golden, model = load_model(name)
    assert (golden.gaps > 2 * ATOL).all()  # no tie that rounding could decide
    rows = [np.concatenate([p, g]) for p, g in zip(golden.prompts, golden.greedy, strict=True)]
    logits = np.asarray(forward(model, padded(rows)))
    assert logits.dtype == np.float32
    for i, prompt in enumerate(golden.prompts):
        np.testing.assert_allclose(logits[i, : len(prompt)], golden.logits[i], atol=ATOL, rtol=0)
        picked = logits[i, len(prompt) - 1 : len(rows[i]) - 1].argmax(-1)
        np.testing.assert_array_equal(picked, golden.greedy[i])


PAGE_SIZE, NUM_PAGES, NUM_TOKENS = 4, 48, 40


@nnx.jit
def paged_step(model, caches, tokens, positions, slots, table, cu_q_lens, kv_lens):
    """Logits of every token of a packed, padded step, and the caches."""
    x, rope = model.embed(tokens), model.rope(positions)
    written = []
    for layer, cache in zip(model.layers, caches, strict=True):

        def attend(q, k, v, window=layer.sliding_window, cache=cache):
            cache = write_kv(cache, k, v, slots)
            return ragged_paged_attention(q, cache, table, cu_q_lens, kv_lens, sliding_window=window), cache

        x, cache = layer(x, rope, attend, num_tokens=cu_q_lens[-1])
        written.append(cache)
    return model.logits(model.final_norm(x)), written


@pytest.mark.parametrize(
    "name, transposed",
    [("qwen3_windows", False)]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in ("qwen3_moe", "qwen3_tied", "mistral", "qwen3_moe_tied")]
    + [("qwen3_tied", True), pytest.param("mistral", True, marks=pytest.mark.slow)],
)
def test_packed_paged_forward_matches_transformers(load_model, name, transposed):
    """The same layers over shuffled pages, prompts in three uneven steps: whole, chunked and one-token rows mixed."""
    golden, model = load_model(name)
    if transposed:
        model = transpose_kernels(nnx.clone(model))
    prompts, config = golden.prompts, model.config
    S = len(prompts)
    table = np.random.default_rng(0).permutation(NUM_PAGES)[: S * 10].reshape(S, 10).astype(np.int32)
    shape = (NUM_PAGES, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    caches = [jnp.full(shape, jnp.nan) for _ in model.layers]
    got = [[] for _ in prompts]
    starts = np.zeros(S, np.int32)
    for lens in np.array([(1, 3, 10, 22), (0, 1, 9, 1), (0, 3, 0, 17)], np.int32):
        real = lens.sum()
        tokens, positions = np.zeros((2, NUM_TOKENS), np.int32)
        tokens[:real] = np.concatenate([p[s : s + n] for p, s, n in zip(prompts, starts, lens, strict=True)])
        positions[:real] = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
        slots = NUM_PAGES * PAGE_SIZE + np.arange(NUM_TOKENS, dtype=np.int32)
        page = table[np.repeat(np.arange(S), lens), positions[:real] // PAGE_SIZE]
        slots[:real] = page * PAGE_SIZE + positions[:real] % PAGE_SIZE
        cu_q_lens = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        logits, caches = paged_step(model, caches, tokens, positions, slots, table, cu_q_lens, starts + lens)
        for i, part in enumerate(np.split(np.asarray(logits)[:real], cu_q_lens[1:-1])):
            got[i].append(part)
        starts = starts + lens
    for parts, expected in zip(got, golden.logits, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=ATOL, rtol=0)


def reconfigured(model, **changes):
    """The model's weights under a changed config; weights that it no longer has are left out."""
    abstract = Decoder.abstract(dataclasses.replace(model.config, **changes), jnp.float32)
    leaves = named_leaves(model)
    return with_leaves(abstract, {path: leaves[path] for path in named_leaves(abstract)})


def rope_change(**changes):
    return lambda config: {"rope": dataclasses.replace(config.rope, **changes)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_tied", lambda c: {"qk_norm": False}),
        pytest.param("qwen3_tied", lambda c: {"rms_norm_eps": 0.1}, marks=pytest.mark.slow),
        pytest.param("qwen3_tied", rope_change(theta=10_000.0), marks=pytest.mark.slow),
        pytest.param("qwen3_windows", lambda c: {"o_bias": False}, marks=pytest.mark.slow),
        ("qwen3_windows", lambda c: {"qkv_bias": False}),
        pytest.param("qwen3_windows", lambda c: {"sliding_windows": (None, None, None)}, marks=pytest.mark.slow),
        ("qwen3_windows", lambda c: {"sliding_windows": (5, None, None)}),
        pytest.param("qwen3_windows", lambda c: {"sliding_windows": (6, None, 6)}, marks=pytest.mark.slow),
        ("qwen2", lambda c: {"qkv_bias": False}),
        pytest.param("qwen2", lambda c: {"sliding_windows": (None, None, None)}, marks=pytest.mark.slow),
        ("llama", lambda c: {"qkv_bias": False}),
        pytest.param("llama", lambda c: {"o_bias": False}, marks=pytest.mark.slow),
        pytest.param("llama", lambda c: {"mlp_bias": False}, marks=pytest.mark.slow),
        pytest.param("llama_rope_linear", rope_change(rope_type="default"), marks=pytest.mark.slow),
        ("llama_rope_linear", rope_change(factor=3.0)),
        pytest.param("llama_rope_llama3", rope_change(rope_type="default"), marks=pytest.mark.slow),
        pytest.param("llama_rope_llama3", rope_change(low_freq_factor=2.0), marks=pytest.mark.slow),
        ("llama_rope_llama3", rope_change(high_freq_factor=3.0)),
        pytest.param("llama_rope_llama3", rope_change(original_max_position_embeddings=32), marks=pytest.mark.slow),
        pytest.param("llama_rope_yarn", rope_change(rope_type="default"), marks=pytest.mark.slow),
        pytest.param("llama_rope_yarn", rope_change(attention_factor=1.0), marks=pytest.mark.slow),
        ("llama_rope_yarn", rope_change(beta_slow=4.0)),
        pytest.param("llama_rope_yarn_mscale", rope_change(beta_fast=32.0), marks=pytest.mark.slow),
        pytest.param("llama_rope_yarn_mscale", rope_change(truncate=True), marks=pytest.mark.slow),
        ("llama_rope_yarn_mscale", rope_change(mscale=None)),
        pytest.param("llama_rope_yarn_mscale", rope_change(mscale_all_dim=None), marks=pytest.mark.slow),
        pytest.param("llama_rope_yarn_factor", rope_change(attention_factor=None), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", lambda c: {"norm_topk_prob": False}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", lambda c: {"num_experts_per_token": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_tied", lambda c: {"norm_topk_prob": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_tied", lambda c: {"num_experts_per_token": 4}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_tied", lambda c: {"sliding_windows": (None, 9, 9, 9)}, marks=pytest.mark.slow),
        ("mistral", lambda c: {"sliding_windows": (7, None)}),
        pytest.param("mistral", lambda c: {"sliding_windows": (8, 8)}, marks=pytest.mark.slow),
    ],
)
def test_every_switch_has_an_effect(load_model, name, change):
    """With one setting wrong, the golden's longest prompt is missed by far: the match above says that it is right."""
    golden, model = load_model(name)
    changed = reconfigured(model, **change(model.config))
    logits = np.asarray(forward(changed, padded(golden.prompts[-1:])))[0]
    assert np.abs(logits - golden.logits[-1]).max() > 50 * ATOL


def test_untied_embeddings_use_lm_head():
    untied = with_leaves(Decoder.abstract(TINY, jnp.float32), random_params(TINY, 0, jnp.float32))
    x = jax.random.normal(jax.random.key(1), (5, 32))
    np.testing.assert_allclose(untied.logits(x), x @ named_leaves(untied)["lm_head/kernel"], rtol=1e-5, atol=1e-6)
    tied = reconfigured(untied, tie_word_embeddings=True)
    assert "lm_head/kernel" not in named_leaves(tied)
    np.testing.assert_allclose(tied.logits(x), x @ named_leaves(tied)["embed_tokens/embedding"].T, rtol=1e-5, atol=1e-6)


def test_bf16_stays_close_and_gives_unrounded_float32_logits(load_model):
    """8 bits of mantissa through two layers: the error against float32 is a few percent of the logits' spread (2.6)."""
    golden, model = load_model("qwen3_tied")
    leaves = {path: leaf.astype(jnp.bfloat16) for path, leaf in named_leaves(model).items()}
    half = with_leaves(Decoder.abstract(model.config), leaves)  # the checkpoint is bf16, so the weights are the same
    prompt = padded(golden.prompts[-1:])
    assert half.embed(prompt).dtype == jnp.bfloat16
    logits = np.asarray(forward(half, prompt))[0]
    assert logits.dtype == np.float32
    error = logits - golden.logits[-1]
    assert 0 < np.sqrt(np.mean(error**2)) < 0.05 * golden.logits[-1].std()
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "qwen3_windows", ["qwen3_windows", "qwen3_moe"]))
def test_gradients_reach_every_weight_and_agree_with_differences(load_model, name):
    golden, model = load_model(name)
    tokens = padded(golden.prompts[2:])
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def loss(leaves):
        logits = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    grads = jax.jit(jax.grad(loss))(leaves)
    for path, grad in zip(named_leaves(model), grads, strict=True):
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0, path
    norm = float(jnp.sqrt(sum((g**2).sum() for g in grads)))
    step = 2e-3 / norm  # along the gradient: the loss must change by step * norm^2 = 2e-3 norm
    ahead, behind = (loss([w + sign * step * g for w, g in zip(leaves, grads, strict=True)]) for sign in (1, -1))
    assert float(ahead - behind) / (2 * step) == pytest.approx(norm**2, rel=0.02)


def test_flat_leaves_run_under_a_plain_jit(load_model):
    golden, model = load_model("qwen3_windows")
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    assert all(x is y for x, y in zip(leaves, named_leaves(model).values(), strict=True))  # one order everywhere
    run = jax.jit(lambda leaves, tokens: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(tokens))
    logits = run(leaves, padded(golden.prompts[1:2]))
    np.testing.assert_allclose(logits[0], golden.logits[1], atol=ATOL, rtol=0)


@pytest.mark.parametrize("windows", [(None, None, None), (5, None, 5)])
def test_layers_of_one_structure_share_one_traced_function(windows):
    """What the step relies on: a graph definition does not say which layer it is, so one inner jit serves all alike."""
    model = Decoder(dataclasses.replace(TINY, sliding_windows=windows), rngs=nnx.Rngs(0))
    graphdefs = [nnx.split(layer)[0] for layer in model.layers]
    assert len(set(graphdefs)) == len(set(windows))
    traced = []

    def outlined(graphdef, state, x, rope):
        traced.append(graphdef)
        return nnx.merge(graphdef, state)(x, rope, lambda q, k, v: (q, None))[0]

    layer_jit = jax.jit(outlined, static_argnums=0)

    @jax.jit
    def body(states, x):
        rope = model.rope(jnp.arange(x.shape[0]))
        for graphdef, state in zip(graphdefs, states, strict=True):
            x = layer_jit(graphdef, state, x, rope)
        return x

    text = body.lower([nnx.split(layer)[1] for layer in model.layers], jnp.ones((6, 32), jnp.bfloat16)).as_text()
    assert len(traced) == len(set(windows))
    assert text.count("call @outlined") == 3


def test_dense_and_sparse_layers_are_two_structures(load_model):
    _, model = load_model("qwen3_moe")
    graphdefs = [nnx.split(layer)[0] for layer in model.layers]
    assert graphdefs[0] == graphdefs[2] == graphdefs[3] != graphdefs[1]


def test_abstract_allocates_nothing_and_has_the_concrete_shapes():
    abstract, concrete = Decoder.abstract(TINY), Decoder(TINY, rngs=nnx.Rngs(0))
    leaves = named_leaves(abstract)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.values())
    shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    assert shapes == {path: (leaf.shape, leaf.dtype) for path, leaf in named_leaves(concrete).items()}
    assert shapes["layers/2/attention/qkv_proj/kernel"] == ((32, (4 + 2 * 2) * 16), jnp.bfloat16)
    assert shapes["layers/0/mlp/gate_up_proj/kernel"] == ((32, 96), jnp.bfloat16)
    assert nnx.graphdef(abstract) == nnx.graphdef(concrete)


SPARSE = {"sparse_layers": (0, 2), "num_experts": 5, "num_experts_per_token": 2, "moe_intermediate_size": 12}


@pytest.mark.parametrize(
    "switches", [{}, {"tie_word_embeddings": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}, SPARSE]
)
def test_num_weights_counts_every_weight(switches):
    config = dataclasses.replace(TINY, **switches)
    assert num_weights(config) == sum(leaf.size for leaf in named_leaves(Decoder.abstract(config)).values())


@pytest.mark.slow
def test_random_params():
    config = dataclasses.replace(TINY, qkv_bias=True)
    params = random_params(config, seed=3)
    assert {path: (x.shape, x.dtype) for path, x in params.items()} == {
        path: (x.shape, x.dtype) for path, x in named_leaves(Decoder.abstract(config)).items()
    }
    assert (params["layers/1/mlp_norm/scale"] == 1).all()
    table = np.asarray(params["embed_tokens/embedding"], np.float32)
    assert abs(table.std() - 0.02) < 0.001 and abs(table.mean()) < 0.002
    again, other = random_params(config, seed=3), random_params(config, seed=4)
    weights = [path for path in params if not path.endswith("/scale")]
    assert all((params[path] == again[path]).all() for path in weights)
    assert all((params[path] != other[path]).any() for path in weights)
    kernels = [np.asarray(params[f"layers/{i}/mlp/down_proj/kernel"]) for i in range(3)]
    assert (kernels[0] != kernels[1]).mean() > 0.9 and (kernels[1] != kernels[2]).mean() > 0.9
    logits = forward(with_leaves(Decoder.abstract(config), params), jnp.zeros((1, 4), jnp.int32))
    assert np.isfinite(logits).all()


def test_with_leaves_lists_everything_that_does_not_fit():
    leaves = random_params(TINY)
    del leaves["final_norm/scale"]
    leaves["extra"] = jnp.zeros(3)
    leaves["lm_head/kernel"] = jnp.zeros((64, 32), jnp.bfloat16)
    leaves["layers/0/mlp_norm/scale"] = jnp.ones(32)
    with pytest.raises(ValueError) as error:
        with_leaves(Decoder.abstract(TINY), leaves)
    for fault in (
        "missing final_norm/scale",
        "unknown extra",
        "lm_head/kernel is bfloat16[64, 32], not bfloat16[32, 64]",
        "layers/0/mlp_norm/scale is float32[32], not bfloat16[32]",
    ):
        assert fault in str(error.value)


def test_with_leaves_copies_nothing_and_leaves_the_module_alone():
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    before = named_leaves(model)
    leaves = random_params(TINY)
    replaced = with_leaves(model, leaves)
    assert all(named_leaves(replaced)[path] is leaf for path, leaf in leaves.items())
    assert all(named_leaves(model)[path] is leaf for path, leaf in before.items())
