"""An LLM on a model whose greedy output can be written down (tests/alphabet_model.py), asked as users of vLLM ask."""

from typing import Any

from jaxserve import LLM, BucketPlan, RequestOutput, SamplingParams
from tests import alphabet_model
from tests.scheduler_state import has_unfinished

POISON = "\x01"  # its embedding is NaN
PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))  # few shapes, for the compiler's sake
OPTIONS = {"bucket_plan": PLAN, "num_pages": 64, "page_size": 4}
LONGEST = alphabet_model.CONFIG["max_position_embeddings"]


def greedy(**params) -> SamplingParams:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | params
    return SamplingParams(**given)


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_unfinished_requests() and not has_unfinished(engine.scheduler)
    engine.scheduler.check_invariants()
    assert engine.pool.num_free_pages == engine.pool.num_pages
    assert not llm._grown and not llm._texts._groups


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def generate(llm: LLM, prompts, params=None, **given) -> list[RequestOutput]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False, **given)
