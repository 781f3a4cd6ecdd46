"""Conversations of the chat page in a browser: kept, found again, deleted, exported, and bounded."""

import json

import pytest

from tests.serving.http_server import serving, slow_down
from tests.serving.page_tab import IDLE, NEEDS_CHROMIUM, kept, listed, press_button, say, turns, wait_for

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


@pytest.fixture(scope="module")
def server(shared_llm):
    options = {"enable_prompt_tokens_details": True}
    with serving(shared_llm, options=options) as server:
        yield server


# ---- conversations


def test_a_conversation(page, server):
    page.wait("at('model').textContent === 'alphabet' && document.title === 'alphabet'")
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    say(page, "x")
    wait_for(page, 4)
    assert turns(page) == [["turn user", "a"], ["turn assistant", "BCDE"], ["turn user", "x"], ["turn assistant", "BCDE"]]
    assert kept(page) == [["a", "BCDE", "x", "BCDE"]] and listed(page) == ["a"]
    figures = page.run("[...document.querySelectorAll('.figures')].pop().textContent")
    for part in ("4 tokens", "tokens/s", "first after ", "prompt 16 tokens", "cut off"):
        assert part in figures
    page.wait("at('kv').textContent === '0.0 %' && at('running').textContent === '0'")
    page.run("at('new').click()")
    assert turns(page) == [] and listed(page) == ["a"] and page.run("location.hash") == ""


def test_the_share_of_the_prompt_that_was_cached(page):
    say(page, "q" * 60, temperature=0, max_tokens=2)
    wait_for(page, 2)
    press_button(page, "Regenerate")
    page.wait(f"{IDLE} && / [1-9][0-9.]+ % cached/.test(document.querySelector('.figures').textContent)")
    page.wait("parseFloat(at('cached').textContent) > 0")


def test_a_reload_finds_the_conversation_and_the_settings(page):
    say(page, "a", temperature=0, max_tokens=4, system="s")
    wait_for(page, 2)
    page.reload()
    assert turns(page) == [["turn user", "a"], ["turn assistant", "BCDE"]]
    assert page.run("[at('temperature').value, at('max_tokens').value, at('system').value]") == ["0", "4", "s"]
    assert "4 tokens" in page.run("document.querySelector('.figures').textContent")
    say(page, "x")
    wait_for(page, 4)
    assert kept(page) == [["a", "BCDE", "x", "BCDE"]]


def test_others_are_opened_and_deleted(page):
    page.run("window.confirm = () => true")
    for text in ("one", "two", "three"):
        page.run("at('new').click()")
        say(page, text, temperature=0, max_tokens=2)
        wait_for(page, 2)
    assert listed(page) == ["three", "two", "one"]
    page.run("document.querySelectorAll('#list .open')[2].click()")
    assert turns(page)[0] == ["turn user", "one"]
    assert page.run("document.querySelector('[aria-current]').textContent") == "one"
    page.run("document.querySelectorAll('#list .delete')[2].click()")
    assert turns(page) == [] and listed(page) == ["three", "two"] and len(kept(page)) == 2
    page.run("at('delete_all').click()")
    assert listed(page) == [] and kept(page) == []


def elsewhere(page, statement: str) -> None:
    """Runs a statement about `key`, the open conversation's, in another document of this browser; this one hears of it."""
    page.run(f"""new Promise(done => {{
        const key = "jaxserve.conversation." + chat.conversation.id, other = document.createElement("iframe");
        document.body.append(other);
        addEventListener("storage", () => {{ other.remove(); done(); }}, {{ once: true }});
        (localStorage => {{ {statement} }})(other.contentWindow.localStorage);
    }})""")


def test_one_that_is_deleted_in_another_tab_stays_so(page):
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    elsewhere(page, "localStorage[key] = localStorage[key].replace('BCDE', 'other')")
    assert turns(page)[1] == ["turn assistant", "other"]
    elsewhere(page, "delete localStorage[key]")
    assert turns(page) == [] and listed(page) == [] and page.run("location.hash") == ""
    say(page, "x", max_tokens=4)
    wait_for(page, 2)
    assert kept(page) == [["x", "BCDE"]] and listed(page) == ["x"]


@pytest.mark.parametrize("then", ["", "chat.save()"], ids=["", "saved meanwhile"])
def test_an_answer_that_grows_is_not_kept_where_it_is_deleted(page, server, shared_llm, monkeypatch, then):
    slow_down(monkeypatch, shared_llm)
    say(page, "a", temperature=0, max_tokens=150)
    page.wait("document.querySelectorAll('.turn').length === 2")
    elsewhere(page, f"delete localStorage[key]; {then}")
    server.wait_idle()
    page.wait(IDLE)
    assert kept(page) == [] and turns(page) == [] and listed(page) == []


def test_all_are_exported(page, tmp_path):
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    page.run("at('export').click()")
    page.wait("new Promise(done => setTimeout(() => done(true), 200))")
    (one,) = json.loads((tmp_path / "conversations.json").read_text())["conversations"]
    assert [message["content"] for message in one["messages"]] == ["a", "BCDE"]


def test_what_is_kept_is_bounded(page):
    """By number, and by size; the oldest goes. A browser that keeps nothing is said."""
    page.run("""
        for (let i = 0; i < 103; i++)
            conversations.save({ id: `n${i}`, messages: [{ role: "user", content: `${i}` }] }, Date.now = () => i);
        showList()""")
    assert len(kept(page)) == 100 and ["0"] not in kept(page) and ["3"] in kept(page) and listed(page)[0] == "102"
    page.run("""
        for (let i = 0; i < 5; i++)
            conversations.save({ id: `l${i}`, messages: [{ role: "user", content: "x".repeat(9e5) }] }, Date.now = () => 1000 + i);
        """)
    assert page.run("Object.keys(localStorage).filter(k => /conversation.l/.test(k)).sort().map(k => k.slice(-2))") == [
        "l1",
        "l2",
        "l3",
        "l4",
    ]
    page.run("Storage.prototype.setItem = () => { throw new Error('full') }")
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    assert not page.run("at('kept').hidden") and turns(page)[1] == ["turn assistant", "BCDE"]


def test_what_is_none_of_ours_in_the_store_is_passed_over(page):
    page.run("localStorage['jaxserve.conversation.x'] = '{'; localStorage['jaxserve.conversation.y'] = '{\"messages\": [1]}'")
    page.run("localStorage['jaxserve.settings'] = '[]'")
    page.reload()
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    assert listed(page) == ["a"]
