"""Random conversations with an engine whose store fails at random, for tests: answers are those of no store, no page is lost."""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, SamplingParams
from jaxserve.models import named_leaves, with_leaves
from jaxserve.request import StoredPrefix
from tests.dummy import ONE_BUCKET, Ask, add, assert_empty, dummy_model, make_engine, poison
from tests.engine.storing import prompt

NUM_CONVERSATIONS = 12
ABORTED = 0.1  # of all requests


@functools.cache
def other_weights():
    """Those that an update brings."""
    leaves = {path: jnp.asarray(-np.asarray(x)) for path, x in named_leaves(dummy_model()).items()}
    return with_leaves(dummy_model(), leaves)


def weights_of(version: int):
    """Each update changes from the one to the other."""
    return other_weights() if version % 2 else dummy_model()


@dataclass
class Fuzz:
    """What came of the requests. answers: {name: (version of the weights, tokens)} of those that ended. done: what was injected."""

    asks: dict[str, Ask] = field(default_factory=dict)
    answers: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_failed_loads: int = 0

    def wrong(self, **settings: Any) -> list[str]:
        """Which answers are not those of an engine without a store."""
        found = []
        for version in (0, 1):
            mine = {name: tokens for name, (of, tokens) in self.answers.items() if of % 2 == version}
            wanted = {(tuple(self.asks[n].prompt), self.asks[n].params.seed, self.asks[n].params.max_tokens) for n in mine}
            plain = make_engine(weights_of(version), bucket_plan=ONE_BUCKET, **settings)
            right: dict[Any, list[int]] = {key: [] for key in wanted}
            keys = {}
            for i, (tokens, seed, max_tokens) in enumerate(sorted(wanted)):
                keys[str(i)] = tokens, seed, max_tokens
                plain.add_request(str(i), list(tokens), params_of(seed, max_tokens))
            while plain.has_unfinished_requests():
                for output in plain.step():
                    right[keys[output.request.request_id]] += output.new_token_ids
            for name, tokens in mine.items():
                ask = self.asks[name]
                expected = right[tuple(ask.prompt), ask.params.seed, ask.params.max_tokens]
                if tokens != expected:
                    found.append(f"request {name}, weights {version}: {tokens} instead of {expected}")
        return found


def params_of(seed: int | None, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=1.0, ignore_eos=True, seed=seed, max_tokens=max_tokens)


def converse(
    fuzz: Fuzz,
    engine: Engine,
    num_requests: int,
    rng: random.Random,
    trouble: Callable[[], None] = lambda: None,
    tell: Callable[[Ask], StoredPrefix | None] | None = None,
    update_from: float = 0.7,
) -> None:
    """Serves requests whose prompts begin alike, some of them aborted; forgets prefixes and changes the weights now and then.

    trouble: called between steps. tell: what another engine has stored of a request's prompt. update_from: the part of the
    requests behind which weights change, and with them the names of all pages."""
    conversations = [prompt(rng.randrange(3, 60), i) for i in range(NUM_CONVERSATIONS)]
    made = 0
    running: dict[str, list[int]] = {}
    stop: list[str] = []  # are aborted if they do not end before

    def ask() -> None:
        nonlocal made
        c = rng.randrange(len(conversations))
        turn = conversations[c][: rng.randrange(1, 1 + len(conversations[c]))]
        name, wanted = str(len(fuzz.asks)), Ask(turn, params_of(c, rng.randrange(1, 12)))
        told = None if tell is None else tell(wanted)
        (request,) = add(engine, name, wanted)
        request.stored_prefix = told
        fuzz.asks[name], running[name] = wanted, []
        if rng.random() < ABORTED:
            stop.append(name)
        made += 1

    def update() -> None:
        with contextlib.suppress(RuntimeError):  # refused where a request has begun
            engine.update_params(weights_of(engine.runner.num_weight_updates + 1))
            fuzz.done["update"] += 1

    while made < num_requests:
        for _ in range(min(rng.randrange(1, 16), num_requests - made)):
            ask()
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request.request_id
                running[name] += output.new_token_ids
                if output.finished:
                    fuzz.answers[name] = output.request.num_weight_updates, running.pop(name)
                    stop = [other for other in stop if other != name]
            for name in [name for name in stop if rng.random() < 0.2]:
                engine.abort(name)
                fuzz.done["abort"] += 1
                stop.remove(name)
                del running[name]
            if made < num_requests and rng.random() < 0.1:
                ask()
            trouble()
            if made > update_from * num_requests and rng.random() < 0.02:
                update()
            engine.scheduler.check_invariants()
            poison(engine)
        if rng.random() < 0.3:
            assert engine.reset_prefix_cache()
        if made > update_from * num_requests and rng.random() < 0.1:
            update()
    assert_empty(engine)
    stats = engine.stats.kv_store
    assert stats is not None
    fuzz.num_hit_tokens += stats.num_hit_tokens
    fuzz.num_failed_loads += stats.num_failed_loads
    fuzz.num_preemptions += engine.scheduler.stats().num_preemptions
