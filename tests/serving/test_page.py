"""The chat page in a browser: streaming, controls, figures, and nothing a model says becomes markup."""

import pytest

from tests.serving.browser import CHROMIUM, browser
from tests.serving.http_server import serving, slow_down

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package of that name)")


@pytest.fixture(scope="module")
def server(shared_llm):
    with serving(shared_llm) as server:
        yield server


@pytest.fixture
def page(server, tmp_path):
    with browser(tmp_path) as page:
        page.open(server.url)
        yield page
    server.wait_idle()


def say(page, text: str, **controls) -> None:
    for name, value in controls.items():
        page.run(f"document.getElementById({name!r}).value = {str(value)!r}")
    page.run(f"document.getElementById('input').value = {text!r}; document.getElementById('form').requestSubmit()")


def turns(page) -> list[list[str]]:
    return page.run("[...document.querySelectorAll('.turn')].map(e => [e.className, e.textContent])")


IDLE = "document.getElementById('send').textContent === 'Send'"


def test_a_conversation(page, server):
    page.wait("document.getElementById('model').textContent === 'alphabet'")
    say(page, "a", temperature=0, max_tokens=4)
    page.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
    say(page, "x")
    page.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 4")
    assert turns(page) == [["turn user", "a"], ["turn assistant", "BCDE"], ["turn user", "x"], ["turn assistant", "BCDE"]]
    assert page.run("messages.map(m => m.content)") == ["a", "BCDE", "x", "BCDE"]
    assert page.run("document.getElementById('ttft').textContent").endswith(" ms")
    assert float(page.run("document.getElementById('speed').textContent")) > 0
    page.wait("document.getElementById('kv').textContent === '0.0 %'")
    assert all(url.startswith((server.url, "data:", "about:")) for url in page.requests), "no host but ours is asked"
    page.run("document.getElementById('clear').click()")
    assert turns(page) == [] and page.run("messages.length") == 0


def test_an_answer_grows_and_can_be_stopped(page, server, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    say(page, "a", temperature=0, max_tokens=150)
    page.wait("document.querySelectorAll('.turn').length === 2")
    short = len(turns(page)[1][1])
    page.wait(f"document.querySelectorAll('.turn')[1].textContent.length > {short + 3}")
    page.wait("document.getElementById('running').textContent === '1'")
    page.run("document.getElementById('form').requestSubmit()")
    page.wait(IDLE)
    server.wait_idle()
    assert len(turns(page)[1][1]) < 100


def test_what_is_said_is_never_markup(page):
    nasty = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'
    say(page, nasty, temperature=0, max_tokens=4)
    page.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
    assert turns(page)[0] == ["turn user", nasty]
    assert page.run("document.querySelectorAll('#chat img, #chat script').length") == 0 and page.run("window.hit") is None


def test_errors_are_said_and_what_was_refused_is_taken_back(page):
    say(page, "a" * 400, temperature=0, max_tokens=4)
    page.wait(f"{IDLE} && document.querySelectorAll('.error').length === 1")
    assert "max_model_len" in turns(page)[-1][1] and page.run("messages.length") == 0
    say(page, "x")
    page.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 4")
    assert turns(page)[2:] == [["turn user", "x"], ["turn assistant", "BCDE"]]
    assert page.run("messages.map(m => m.content)") == ["x", "BCDE"]


def test_a_new_chat_has_nothing_of_the_last(page, server, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    say(page, "a", temperature=0, max_tokens=150)
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.run("document.getElementById('clear').click()")
    page.wait(IDLE)
    assert turns(page) == [] and page.run("messages.length") == 0
