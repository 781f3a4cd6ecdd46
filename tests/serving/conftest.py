"""One model for all tests of serving: programs are compiled once. Each test must leave it idle, with all pages free."""

import pytest

from jaxserve import LLM, BucketPlan
from tests import alphabet_model
from tests.serving.http_server import serving

PLAN = BucketPlan(decode=(4,), mixed=((32, 4),), head_rows=(4,))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"))


@pytest.fixture(scope="session")
def shared_llm(folder):
    return LLM(folder, bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")


@pytest.fixture
def llm(shared_llm):
    """The shared LLM, looked at afterwards."""
    yield shared_llm
    assert not shared_llm.engine.has_unfinished_requests()
    shared_llm.engine.scheduler.check_invariants()
    assert shared_llm.engine.pool.num_free_pages == shared_llm.engine.pool.num_pages


@pytest.fixture(scope="module")
def shared(shared_llm):
    with serving(shared_llm) as server:
        yield server


@pytest.fixture
def server(shared):
    """The module's server, which a test must leave idle, with all pages free."""
    yield shared
    shared.wait_idle()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A server whose chat template knows <think>, and opens it where `opening` says so; </think> is a token, <think> is not."""
    template = alphabet_model.CHAT_TEMPLATE + "{# </think> #}"
    folder = alphabet_model.save(tmp_path_factory.mktemp("thinking"), chat_template=template, added_tokens=["</think>"])
    with serving(LLM(folder, bucket_plan=PLAN, num_pages=96, page_size=4, compilation_cache_dir="")) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    from tests.serving.browser import browser

    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(server, tab):
    from tests.serving.page_tab import opened

    yield opened(tab, server.url)
    assert tab.errors == []
    assert all(url.startswith((server.url, f"blob:{server.url}", "data:", "about:")) for url in tab.requests), (
        "no host but ours is asked"
    )
    server.wait_idle()
