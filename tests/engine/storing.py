"""Engines with a store of KV, for tests: made, opened up, and waited for."""

import time
from typing import Any

import numpy as np

from jaxserve import Engine, SamplingParams
from jaxserve.engine.stats import KVStoreStats
from jaxserve.kv_store.store import Job
from tests.dummy import ONE_BUCKET, VOCAB, Ask, dummy_model, make_engine, serve

HOST = "host:4MiB"  # 4,096 pages
NAME = "weights of the tests"


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(1, VOCAB, n).tolist()


def asks(*seeds, n=40, **params):
    params = {"max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 1, **params}
    return [Ask(prompt(n, seed), SamplingParams(**params)) for seed in seeds]


def engine_with(store: str | None = HOST, **settings):
    engine = make_engine(dummy_model(), bucket_plan=ONE_BUCKET, **{"kv_store": store, "pool_pages": 30, **settings})
    if engine.stored_pages is not None:
        stored(engine).load_seconds = 60.0  # of a slow machine
    return engine


def stored(engine: Engine) -> Any:
    """What joins the engine to its store, opened up: tests hold its loads and saves back."""
    assert engine.stored_pages is not None
    return engine.stored_pages


def counts(engine: Engine) -> KVStoreStats:
    assert engine.stats.kv_store is not None
    return engine.stats.kv_store


def settle(engine):
    """Waits until all that was saved is kept."""
    pages, deadline = stored(engine), time.monotonic() + 120
    while pages.is_saving:
        assert time.monotonic() < deadline, "saves that do not end"
        pages.save(rest=True)
        pages.poll(10.0)


def served(engine, wanted):
    """The answers, once their pages are kept too."""
    answers = serve(engine, wanted).answers
    settle(engine)
    return answers


def expected(wanted):
    return serve(make_engine(dummy_model(), bucket_plan=ONE_BUCKET), wanted).answers


def hold_loads(engine):
    """Loads that begin from now on never end. Returns what they were asked for."""
    asked = []

    def load(hashes, into, *, told):
        asked.append((hashes, into))
        return Job("load", hashes, into)

    stored(engine).store.load = load
    return asked


def run(engine):
    """Steps until no request is left."""
    deadline = time.monotonic() + 120
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline, "requests that do not end"
        engine.step()


def wait_for(condition):
    """Until it holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "what does not come"
        time.sleep(0.001)
