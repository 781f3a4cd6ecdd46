"""Sleep: what is freed, what comes back, by parts too, and what is refused meanwhile."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve import Engine
from jaxserve.execution.compilation import compile_counts
from jaxserve.models import with_leaves
from tests.dummy import ONE_BUCKET, Ask, differences, dummy_model, make_engine, serve
from tests.engine.other_weights import GREEDY, OTHER, PROMPT, greedy_alone, leaves_of, run_out
from tests.workload import alone, requests


@pytest.fixture
def engine() -> Engine:
    return make_engine(dummy_model(), bucket_plan=ONE_BUCKET)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_wake_up_brings_it_back(engine, level):
    model = with_leaves(dummy_model(), {path: jnp.array(x) for path, x in leaves_of().items()})
    engine.update_params(model)
    serve(engine, requests(True))
    tokens, answers = greedy_alone(dummy_model(), PROMPT, 12), alone("float32", True)  # of engines of their own, which compile
    before, runner = compile_counts().programs, engine.runner
    state = jax.tree.leaves(runner.state)
    weights = list(runner.programs.functions.weights)
    engine.sleep(level)
    engine.sleep(level)
    assert all(x.is_deleted() for x in state)
    assert not any(isinstance(x, jax.Array) for x in runner.programs.functions.weights)
    assert not any(x.is_deleted() for x in weights), "a trainer's weights are not the engine's to delete"
    with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\)"):
        engine.add_request("x", PROMPT, GREEDY)
    engine.wake_up()
    engine.wake_up()
    if level == 2:
        with pytest.raises(RuntimeError, match=r"no weights .*update_params\(\)"):
            engine.add_request("x", PROMPT, GREEDY)
        engine.update_params(model)
    hits = engine.pool.num_hit_tokens
    run = serve(engine, [Ask(PROMPT, GREEDY)])
    assert run.answers["0"].tokens == tokens and run.stats.num_hit_tokens == hits
    assert differences(serve(engine, requests(True)).answers, answers) == []
    assert compile_counts().programs == before


@pytest.mark.parametrize("level", [1, 2])
def test_weights_may_come_while_it_sleeps(engine, level):
    engine.sleep(level)
    engine.update_params(OTHER)
    engine.wake_up()
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == greedy_alone(OTHER, PROMPT, 12)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_before_the_pages(engine, level):
    """A trainer's order: the weights wake and change while the pages' memory is still free."""
    expected = greedy_alone(OTHER, PROMPT, 12)  # of an engine of its own, which compiles
    before, runner = compile_counts().programs, engine.runner
    engine.sleep(level)
    engine.wake_up(["weights"])
    assert engine.is_asleep and all(x.is_deleted() for x in jax.tree.leaves(runner.state))
    assert all(isinstance(x, jax.Array) == (level == 1) for x in runner.programs.functions.weights)
    with pytest.raises(RuntimeError, match=r"kv_cache is asleep: call wake_up\(\)"):
        engine.add_request("x", PROMPT, GREEDY)
    engine.update_params(OTHER)
    engine.wake_up(["kv_cache"])
    assert not engine.is_asleep
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == expected
    assert compile_counts().programs == before


def test_what_is_half_awake_sleeps_again(engine):
    engine.update_params(OTHER)
    engine.sleep()
    engine.wake_up(["kv_cache"])
    state = jax.tree.leaves(engine.runner.state)
    with pytest.raises(RuntimeError, match=r"weights is asleep"):
        engine.add_request("x", PROMPT, GREEDY)
    engine.sleep()
    assert engine.is_asleep and all(x.is_deleted() for x in state)
    with pytest.raises(ValueError, match=r"tags=\['kv'\] must be of weights, kv_cache"):
        engine.wake_up(["kv"])
    engine.wake_up(["weights", "kv_cache"])
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == greedy_alone(OTHER, PROMPT, 12)


def test_a_deeper_sleep_lets_go_of_weights_that_sleep(engine):
    engine.update_params(OTHER)
    engine.sleep(1)
    engine.wake_up(["kv_cache"])
    engine.sleep(2)
    assert all(x is None for x in engine.runner.programs.functions.weights)
    engine.wake_up()
    with pytest.raises(RuntimeError, match=r"no weights .*update_params\(\)"):
        engine.add_request("x", PROMPT, GREEDY)
    engine.update_params(OTHER)
    assert serve(engine, [Ask(PROMPT, GREEDY)]).answers["0"].tokens == greedy_alone(OTHER, PROMPT, 12)


def test_sleep_with_unfinished_requests_is_refused(engine):
    engine.add_request("x", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.sleep()
    with pytest.raises(ValueError, match="level=3 must be 1"):
        engine.sleep(3)
    assert run_out(engine)["x"].tokens == greedy_alone(dummy_model(), PROMPT, 12)
