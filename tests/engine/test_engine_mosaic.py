"""The engine on the Mosaic kernels, interpreted: work lists planned by the packer, carried by the step's upload, and all that
stands between one attention and the next."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import BucketPlan, Engine, EngineConfig, SamplingParams
from jaxserve.engine import kernel_choice
from jaxserve.models import Decoder, ModelConfig, RopeConfig, named_leaves, with_leaves
from kernels import gpu

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    sliding_windows=(None, 9),
    qk_norm=True,
    tie_word_embeddings=False,
)
DRAFTS = {"num_speculative_tokens": 2, "adaptive": False}
PROMPTS = {"a": list(range(1, 23)), "b": [48, 53, 34]}  # the likeliest token is e**0.5 times as likely as the next one, or more
# The interpreter multiplies with numpy, which warns of the NaN that stands in slots and rows that nobody reads.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


def model() -> Decoder:
    rng = np.random.default_rng(3)
    abstract = Decoder.abstract(CONFIG, "bfloat16")
    leaves = {}
    for path, leaf in named_leaves(abstract).items():
        x = rng.standard_normal(leaf.shape)
        x = 1 + 0.1 * x if path.endswith("/scale") else x * 2 / np.sqrt(leaf.shape[0])
        leaves[path] = jnp.asarray(x, "bfloat16")
    return with_leaves(abstract, leaves)


def tokens_and_logprobs(backend: str, speculative: dict | None = None, **options: Any) -> dict[str, list[tuple[int, float]]]:
    """What each prompt is answered with, two requests sharing the steps: a chunked prompt beside decodes, or beside drafts."""
    plan = BucketPlan(decode=(2,), mixed=((16, 2),), head_rows=(2,))
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)
    if speculative is not None:
        plan = BucketPlan(mixed=((16, 2),), head_rows=(6,), draft=((2, 2),))
        params = params.with_(max_tokens=7, allowed_token_ids=[1, 2])
    config = EngineConfig(
        page_size=16,
        num_pages=12,
        max_model_len=64,
        bucket_plan=plan,
        speculative_config=speculative,
        attention_backend=backend,
        compilation_cache_dir="",
        **options,
    )
    engine = Engine(model(), config, eos_token_ids=())
    assert f"attention: {backend};" in engine.describe()
    assert f"matmuls: {options.get('matmul_backend')};" in engine.describe() or not options
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params)
    answers: dict[str, list[tuple[int, float]]] = {name: [] for name in PROMPTS}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for token, logprobs in zip(output.new_token_ids, output.logprobs or [], strict=True):
                answers[output.request.request_id].append((token, logprobs[token].logprob))
    assert engine.config.attention_backend == backend
    stats = engine.stats
    assert speculative is None or 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    return answers


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.slow
def test_interpreted_mosaic_answers_as_xla_does(speculative):
    """With drafts, the lengths that are planned for are bounds of the device's."""
    with gpu.interpreted():
        got = tokens_and_logprobs("mosaic_sm90", speculative)
    want = tokens_and_logprobs("xla", speculative)
    for name in PROMPTS:
        assert [token for token, _ in got[name]] == [token for token, _ in want[name]]
        np.testing.assert_allclose([p for _, p in got[name]], [p for _, p in want[name]], atol=0.1)


@pytest.mark.slow
def test_a_whole_step_of_interpreted_kernels_answers_as_xla_does(monkeypatch):
    """Attention, rotary write and the matmuls with norm and gate."""
    monkeypatch.setattr(kernel_choice, "resolve_rotary_write", lambda *_, **__: "mosaic")
    with gpu.interpreted():
        got = tokens_and_logprobs("mosaic_sm90", matmul_backend="mosaic_sm90")
    want = tokens_and_logprobs("xla")
    for name in PROMPTS:
        assert [token for token, _ in got[name]] == [token for token, _ in want[name]]
        np.testing.assert_allclose([p for _, p in got[name]], [p for _, p in want[name]], atol=0.1)


def test_an_engine_without_a_hopper_gpu_says_what_mosaic_lacks():
    config = EngineConfig(page_size=16, attention_backend="mosaic_sm90", compilation_cache_dir="")
    with pytest.raises(NotImplementedError, match="mosaic_sm90 .* compute capability 9.0, found cpu"):
        Engine(model(), config)
