"""Steps that stall, or only seem to, on processes of which every one beats: scenarios of `tests.hosts.program`."""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import Engine, EngineConfig, HostGroup, SamplingParams
from jaxserve.engine.follower import Follower
from jaxserve.execution.runner import Runner
from tests.dummy import ONE_BUCKET, SETTINGS, dummy_model

LONG = 40.0  # seconds; no test waits so long
COMPILE = 13.0  # seconds: longer than a step may take


def stalled_step(hosts: HostGroup, *, blocked: bool, compiling: str) -> Any:
    """One request. blocked: behind its second token a dispatch stands still inside XLA on host 0; "ready" is printed. compiling: on
    host 1 a compile that takes long, "behind" the steps or "awaited" by the first of them; or "nothing"."""
    weights, config = dummy_model(), EngineConfig(**{**SETTINGS, "bucket_plan": ONE_BUCKET, "tensor_parallel_size": 2})
    if not hosts.leads:
        follower = Follower(weights, config, hosts=hosts)
        if compiling != "nothing":
            _compile_slowly(follower._runner.programs, behind=compiling == "behind")
        follower.run()
        return None
    engine = Engine(weights, config, eos_token_ids=(), hosts=hosts)
    tokens = 0
    engine.add_request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=8))
    while engine.has_unfinished_requests():
        if blocked and tokens >= 2:
            Runner.run_body = _stand_still  # pyright: ignore[reportAttributeAccessIssue]
        tokens += sum(len(output.new_token_ids) for output in engine.step())
    engine.close()
    return {"tokens": tokens}


def _stand_still(*_: Any) -> None:
    def sleep(x: Any) -> Any:
        time.sleep(LONG)
        return x

    print("ready", flush=True)
    jax.jit(lambda x: jax.pure_callback(sleep, x, x))(jnp.ones(1)).block_until_ready()


def _compile_slowly(programs: Any, *, behind: bool) -> None:
    compile_program = programs._compile

    def slowly(key: Any) -> Any:
        if (key == "score") == behind:
            time.sleep(LONG if behind else COMPILE)
            programs._compile = compile_program
        return compile_program(key)

    programs._compile = slowly
    if behind:
        threading.Thread(target=programs.compile, args=("score",), daemon=True).start()
