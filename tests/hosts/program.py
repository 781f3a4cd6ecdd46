"""A host of a group as a process of its own, for tests: `python -m tests.hosts.program '{"host_id": 0, ...}'`.

Fields: host_id, num_hosts and coordinator (without them: one process), scenario (a function below), and its arguments; versions:
of packages, which this host claims to have. Host 0 prints what it found as one line of JSON, the last.
"""

import dataclasses
import hashlib
import json
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints import orbax
from jaxserve import (
    LLM,
    BucketPlan,
    Engine,
    EngineConfig,
    HostGroup,
    HostLostError,
    SamplingParams,
    StructuredOutputsParams,
    follow,
    join_hosts,
)
from jaxserve.engine import runner_setup
from jaxserve.engine.follower import Follower
from jaxserve.execution.compilation import compile_counts
from jaxserve.models.shard_placement import plain_weights
from jaxserve.models.shards import ShardedModel
from tests.dummy import SEQS, SETTINGS, VOCAB, Answer, dummy_model
from tests.hosts.stalls import stalled_step
from tests.parallel.models import MODELS


def whole_llm(hosts: HostGroup | None, folder: str, other: str, **options: Any) -> Any:
    """Everything that travels to the other hosts: steps, masks, sleep, weights."""
    if hosts is not None and not hosts.leads:
        follow(folder, hosts=hosts, **options)
        return None
    llm = LLM(folder, hosts=hosts, **options)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    form = greedy.with_(structured_outputs=StructuredOutputsParams(regex="[x-z]{3}"), ignore_eos=False)
    compiled = compile_counts().programs

    def texts(*prompts: str, params: SamplingParams = greedy) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(list(prompts), params, use_tqdm=False)]

    found: dict[str, Any] = {"greedy": texts("a", "k"), "form": texts("w", params=form)}
    scored = llm.generate({"prompt_token_ids": list(b"abz")}, greedy.with_(logprobs=1, prompt_logprobs=0), use_tqdm=False)[0]
    found["logprobs"] = [[(token, x.logprob) for token, x in step.items()] for step in scored.outputs[0].logprobs or ()]
    found["scores"] = [[(token, x.logprob) for token, x in (entry or {}).items()] for entry in scored.prompt_logprobs or ()]
    llm.sleep()
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    found["awake"] = texts("b")
    llm.update_params(llm.engine.read_weights(other))
    found["other weights"] = texts("c")
    for wrong in (other + "-gone", other):
        try:
            llm.update_params(llm.engine.read_weights(wrong) if wrong != other else {})
        except (FileNotFoundError, NotImplementedError, ValueError) as error:
            found[f"refused {len(found)}"] = f"{type(error).__name__}: {error}"
    functions, found["not saved"] = llm.engine.runner.programs.functions, []
    weights = dict(zip(functions.paths, functions.weights, strict=True))
    held = ShardedModel(functions.shards, None, weights)  # pyright: ignore[reportArgumentType]
    for save in (lambda: orbax.save(other + "-saved", {"x": np.ones(3)}), lambda: dict(plain_weights(held))):
        try:
            save()
        except NotImplementedError as error:
            found["not saved"].append(str(error))
    found["after refusals"] = texts("d")
    found["compiled"] = compile_counts().programs - compiled
    llm.close()
    return found


def read_llm(hosts: HostGroup | None, path: str, prompts: list[list[int]], **options: Any) -> Any:
    """Tokens and log-probabilities of greedy answers of what is read from `path`, and once more after the same weights are set."""
    if hosts is not None and not hosts.leads:
        follow(path, hosts=hosts, **options)
        return None
    llm = LLM(path, hosts=hosts, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)

    def answered() -> list[list[tuple[int, float]]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [[(t, x.logprob) for entry in output.outputs[0].logprobs or () for t, x in entry.items()] for output in outputs]

    first = answered()
    llm.update_params(llm.engine.read_weights(path))
    again = answered()
    llm.close()
    return {"first": first, "again": again}


def random_requests(
    hosts: HostGroup | None,
    model: str,
    tp: int,
    count: int,
    deterministic: str = "bucket",
    num_seqs: int = SEQS,
    seed: int = 0,
    stop_after: int = 0,
    wait: bool = False,
    pp: int = 1,
    layers: int = 2,
    turned: bool = False,
    kv_store: str | None = None,
) -> Any:
    """`count` requests of all kinds, num_seqs of them in a step and seven times as many at a time, in a pool that is too small for
    them; a digest of their answers. How many were made is said each 500 of them.

    stop_after: prints "ready" after so many steps. wait: goes on for ever, and prints who is lost. turned: a mesh in which every
    stage has a device of every host."""
    num_tokens = 4 * num_seqs
    settings = {**SETTINGS, "deterministic": deterministic, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    settings["kv_store"] = kv_store
    settings |= {
        "max_model_len": 64,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_tokens,
        "num_pages": 10 + 5 * num_seqs // 2,
    }
    settings["bucket_plan"] = BucketPlan(mixed=((num_tokens, num_seqs),), head_rows=(num_seqs,))
    shape = dataclasses.replace(MODELS[model], num_layers=layers, sliding_windows=((None, 6) * layers)[:layers])
    weights, config = dummy_model(config=shape), EngineConfig(**settings)
    mesh = Mesh(np.array(jax.devices()).reshape(tp, pp), ("tp", "pp")) if turned else None
    if hosts is not None and not hosts.leads:
        Follower(weights, config, hosts=hosts, mesh=mesh).run()
        return None
    engine = Engine(weights, config, eos_token_ids=(0,), hosts=hosts, mesh=mesh, weights_id="weights of the tests")
    if engine.stored_pages is not None:
        engine.stored_pages.load_seconds = 60.0  # of a slow machine
    rng = np.random.default_rng(seed)
    answers: dict[str, Answer] = {}
    num_steps, made, started = 0, 0, time.time()
    while made < count or engine.has_unfinished_requests():
        while (made < count or wait) and len(engine._requests) < 7 * num_seqs:
            prompt = rng.integers(1, VOCAB, int(rng.integers(1, 40))).tolist()
            params = SamplingParams(
                temperature=float(rng.choice([0, 0.7, 1.3])),
                top_p=float(rng.choice([1, 0.8])),
                top_k=int(rng.choice([0, 5])),
                repetition_penalty=float(rng.choice([1, 1.2])),
                logprobs=int(rng.integers(0, 3)) or None,
                max_tokens=int(rng.integers(1, 12)),
                seed=int(rng.integers(2**31)),
                n=int(rng.choice([1, 1, 1, 2])),
            )
            answers |= {r.request_id: Answer() for r in engine.add_request(str(made), prompt, params)}
            made += 1
            if made % 500 == 0:
                print(f"{made} of {count} requests, {num_steps} steps, {time.time() - started:.0f} s", file=sys.stderr, flush=True)
        try:
            for output in engine.step():
                answers[output.request.request_id].take(output)
        except HostLostError as error:
            print(f"lost: {error}\n", end="", flush=True)  # in one write: other threads have the same pipe
            raise
        num_steps += 1
        if num_steps == stop_after:
            print("ready", flush=True)
    assert engine.pool.num_free_pages == engine.pool.num_pages
    tokens = {name: answer.tokens for name, answer in answers.items()}
    logprobs = {name: [sorted(x.items()) for x in answer.logprobs] for name, answer in answers.items()}
    bubbles = engine.bubbles
    engine.close()
    digest = lambda x: hashlib.sha256(json.dumps(x, default=float).encode()).hexdigest()  # noqa: E731
    scheduled = engine.scheduler.stats()
    counts = {
        "requests": made,
        "samples": len(answers),
        "steps": num_steps,
        "preemptions": scheduled.num_preemptions,
        "hits": scheduled.num_hit_tokens,
    }
    if engine.stats.kv_store is not None:
        (tier,) = engine.stats.kv_store.tiers
        counts = {"loaded": engine.stats.kv_store.num_hit_tokens, "failed": engine.stats.kv_store.num_failed_loads}
        counts |= {"saved": tier.pages_written, "held": tier.bytes_held}
    return {"tokens": digest(tokens), "bits": digest(logprobs), **counts, "busy": None if bubbles is None else bubbles.busy}


def main() -> None:
    asked = json.loads(sys.argv[1])
    scenarios: dict[str, Any] = {f.__name__: f for f in (whole_llm, read_llm, random_requests, stalled_step)}
    scenario = scenarios[asked.pop("scenario")]
    claimed = asked.pop("versions", {})
    runner_setup.package_version = lambda name, of=runner_setup.package_version: claimed.get(name) or of(name)
    place = {name: asked.pop(name) for name in ("host_id", "num_hosts", "coordinator") if name in asked}
    hosts = join_hosts(**place) if place else None
    found = scenario(hosts, **asked)
    if found is not None:
        print(json.dumps(found), flush=True)
    if hosts is not None:
        hosts.close()


if __name__ == "__main__":
    main()
