"""A server with a store of KV: its metrics say what was kept and loaded."""

import time

import jaxserve
from jaxserve import LLM, BucketPlan
from jaxserve.models.files import find_model
from tests.serving.calls import complete, ok
from tests.serving.http_server import serving
from tests.serving.test_operator_routes import metric

PLAN = BucketPlan(mixed=((32, 4),), head_rows=(32,))
PROMPT = "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz abc"  # a token a character


def wait_until_kept(llm, num_pages):
    """Until the last tier has so many pages."""
    deadline = time.monotonic() + 60
    while llm.engine.stats.kv_store.tiers[-1].pages_written < num_pages and time.monotonic() < deadline:
        time.sleep(0.01)


def test_what_was_kept_and_loaded_is_counted(folder, server, tmp_path):
    store = f"host:1MiB,disk:{tmp_path}:16MiB"
    llm = LLM(folder, kv_store=store, bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")
    assert llm.engine.stored_pages is not None
    shared, _ = llm.engine.pool.root_names
    assert find_model(folder).digest() in shared and jaxserve.__version__ in shared, "what names pages in a folder"
    llm.engine.stored_pages.load_seconds = 60.0  # of a slow machine
    with serving(llm) as keeping:
        plain = ok(complete(server, PROMPT, max_tokens=8))["choices"][0]["text"]
        for _ in range(2):
            assert ok(complete(keeping, PROMPT, max_tokens=8))["choices"][0]["text"] == plain
            keeping.wait_idle()
            wait_until_kept(llm, 14)
            assert llm.engine.reset_prefix_cache(), "nobody uses the engine meanwhile"
        num_loaded = metric(keeping, "external_prefix_cache_hits_total")
        assert num_loaded == 4 * 14, "the prompt's full pages"
        assert metric(keeping, "external_prefix_cache_queries_total") == 2 * num_loaded
        assert metric(keeping, "kv_store_load_failures_total") == 0
        for tier in ("host", "disk"):
            assert metric(keeping, "kv_store_pages_written_total", tier=tier) >= 14
            assert metric(keeping, "kv_store_bytes_held", tier=tier) > 0
        num_read = metric(keeping, "kv_store_pages_read_total", tier="host")
        assert 4 * num_read == num_loaded and not metric(keeping, "kv_store_pages_read_total", tier="disk")
    assert "kv_store" not in server.client.get("/metrics").text
