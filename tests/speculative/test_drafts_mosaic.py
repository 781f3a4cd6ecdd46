"""Models that draft beside the Mosaic kernels, interpreted: their work lists, the host's for bodies and the device's for drafts."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import BucketPlan, Engine, EngineConfig, SamplingParams
from jaxserve.execution.programs import Programs
from jaxserve.models import Decoder, named_leaves, with_leaves
from jaxserve.models.eagle import EagleConfig, EagleHead
from kernels import gpu
from tests.engine.test_engine_mosaic import CONFIG, PROMPTS, model
from tests.selection import chosen

K = 2
# The interpreter multiplies with numpy, which warns of the NaN that stands in slots and rows that nobody reads.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


def random_weights(abstract: Any, seed: int) -> Any:
    rng, leaves = np.random.default_rng(seed), {}
    for path, leaf in named_leaves(abstract).items():
        x = rng.standard_normal(leaf.shape)
        x = 1 + 0.1 * x if path.endswith("scale") else x * 2 / np.sqrt(leaf.shape[0])
        leaves[path] = jnp.arange(leaf.shape[0], dtype=jnp.int32) if path == "draft_ids" else jnp.asarray(x, leaf.dtype)
    return with_leaves(abstract, leaves)


def draft_of(name: str) -> tuple[str, Any]:
    """(the method, what drafts)."""
    if name == "itself":
        return "draft_model", model()
    if name == "other heads":
        return "draft_model", random_weights(Decoder.abstract(replace(CONFIG, num_heads=4, num_kv_heads=2), jnp.bfloat16), 4)
    layer = replace(CONFIG, num_layers=1, sliding_windows=(None,), qk_norm=False)
    config = EagleConfig(layer=layer, version=3, draft_vocab_size=64, hidden_layers=(0, 1, 1))
    return "eagle3", random_weights(EagleHead.abstract(config, jnp.bfloat16), 5)


def proposals(backend: str, name: str) -> tuple[dict[tuple[str, int], list[int]], Engine]:
    """What is drafted behind each request's tokens, by their number: behind a prompt in chunks beside decodes, and behind drafts.
    The engine."""
    method, draft = draft_of(name)
    config = EngineConfig(
        page_size=16,
        num_pages=16,
        max_model_len=64,
        bucket_plan=BucketPlan(mixed=((16, 2),), head_rows=(8,), draft=((2, K),)),
        speculative_config={"method": method, "model": "given", "num_speculative_tokens": K, "adaptive": False},
        attention_backend=backend,
        compilation_cache_dir="",
    )
    engine = Engine(model(), config, eos_token_ids=(), draft=draft)
    requests = [
        engine.add_request(key, prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[0]
        for key, prompt in PROMPTS.items()
    ]
    found = {}
    assert engine.draft_lengths is not None
    while engine.has_unfinished_requests():
        engine.step()
        for request in requests:
            if request.num_output_tokens and not request.finished:
                key = request.request_id, len(request.token_ids)
                found[key] = engine.draft_lengths.proposed[request.row].tolist()
    return found, engine


@pytest.mark.parametrize(
    "name", chosen([("itself",), ("other heads",), ("eagle3",)], quick=lambda _: False, in_ci=lambda name: name == "eagle3")
)
def test_drafts_of_interpreted_kernels_are_those_of_xla(name):
    with gpu.interpreted():
        got, engine = proposals("mosaic_sm90", name)
    want, _ = proposals("xla", name)
    assert isinstance(engine.runner.programs, Programs)
    fields = {field for layout in engine.runner.programs.layouts.values() for field in layout.lists}
    assert ("draft_work_9" in fields) == (name == "other heads") and "work_None" in fields
    both = got.keys() & want.keys()
    assert len(both) >= 4
    same = sum(got[key] == want[key] for key in both)
    assert same >= 0.8 * len(both), "but for near ties"
    stats = engine.stats
    if name == "itself":
        assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens > 0
    assert not any(-1 in drafts for drafts in got.values())
