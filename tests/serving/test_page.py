"""The chat page in a browser: answers that stop and come again, probabilities, forms, thinking, colours, the keyboard alone.
Nothing that a model says becomes markup, and no request leaves the server."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.replay_engine import replay_llm
from tests import alphabet_model
from tests.serving.browser import CONTROL, SHIFT
from tests.serving.http_server import serving, slow_down
from tests.serving.page_tab import IDLE, NEEDS_CHROMIUM, kept, listed, opened, press_button, put, say, turns, wait_for
from tests.serving.test_tools import TEMPLATE

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"))


@pytest.fixture(scope="module")
def server(shared_llm):
    options = {"enable_prompt_tokens_details": True}
    with serving(shared_llm, options=options) as server:
        yield server


# ---- stop, again, errors


def test_an_answer_grows_and_is_stopped(page, server, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    say(page, "a", temperature=0, max_tokens=150)
    page.wait("document.querySelectorAll('.turn').length === 2")
    short = len(turns(page)[1][1])
    page.wait(f"document.querySelector('.assistant > .text').textContent.length > {short + 3}")
    page.wait("at('running').textContent === '1'")
    page.press("Escape")
    page.wait(IDLE)
    server.wait_idle()
    text = turns(page)[1][1]
    assert 0 < len(text) < 100 and kept(page) == [["a", text]]
    monkeypatch.undo()
    put(page, max_tokens=6)
    press_button(page, "Regenerate")
    page.wait(f"{IDLE} && document.querySelector('.assistant > .text').textContent === 'BCDEFG'")
    assert kept(page) == [["a", "BCDEFG"]] and len(turns(page)) == 2


def test_a_page_that_goes_keeps_the_answer_so_far(page, server, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    say(page, "a", temperature=0, max_tokens=150)
    page.wait("(document.querySelector('.assistant > .text')?.textContent.length ?? 0) > 10")
    page.reload()
    assert turns(page)[1][1].startswith("BCDEFGHIJK")


def test_errors_are_said_and_what_was_refused_is_taken_back(page):
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    say(page, "a" * 400)
    wait_for(page, 4)
    assert "max_model_len" in turns(page)[-1][1] and kept(page) == [["a", "BCDE"]]
    say(page, "x")
    wait_for(page, 4)
    assert turns(page)[2:] == [["turn user", "x"], ["turn assistant", "BCDE"]]
    assert kept(page) == [["a", "BCDE", "x", "BCDE"]]


def test_a_lost_server_is_said_and_tried_again(page, server):
    page.run("window.whole = window.fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    assert "can't be reached" in turns(page)[1][1]
    cut = "{ status: 200, body: new Response('data: ' + JSON.stringify(chunk) + '\\n\\n').body, ok: true }"
    chunk = {"choices": [{"delta": {"content": "half"}}], "usage": {"completion_tokens": 1, "prompt_tokens": 1}}
    page.run(f"const chunk = {json.dumps(chunk)}; window.fetch = () => Promise.resolve({cut})")
    press_button(page, "Try again")
    wait_for(page, 3)
    assert [text for _, text in turns(page)][:2] == ["a", "half"] and "broke off" in turns(page)[2][1]
    page.run("window.fetch = window.whole")
    press_button(page, "Try again")
    page.wait(f"{IDLE} && document.querySelector('.assistant > .text').textContent === 'BCDE'")
    assert len(turns(page)) == 2 and kept(page) == [["a", "BCDE"]]


def test_a_key_is_asked_for(tab, shared_llm):
    with serving(shared_llm, options={"api_keys": ("secret",)}) as server:
        page = opened(tab, server.url)
        say(page, "a", temperature=0, max_tokens=4)
        wait_for(page, 2)
        assert "API key" in turns(page)[1][1]
        page.run("at('key').value = 'secret'; at('key').dispatchEvent(new Event('change'))")
        press_button(page, "Try again")
        page.wait(f"{IDLE} && document.querySelector('.assistant > .text')?.textContent === 'BCDE'")
        assert "secret" not in json.dumps(page.run("Object.values(localStorage)"))
        server.wait_idle()


def test_a_new_chat_has_nothing_of_the_last(page, server, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    say(page, "a", temperature=0, max_tokens=150)
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.run("at('new').click()")
    page.wait(IDLE)
    server.wait_idle()
    assert turns(page) == [] and len(kept(page)) == 1
    say(page, "x", max_tokens=4)
    wait_for(page, 2)
    assert listed(page) == ["x", "a"]


@contextlib.contextmanager
def thinking_server(text: str):
    """One whose model says a text, which may think."""
    template = TEMPLATE.replace("{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}", "")
    with serving(replay_llm(8, text=text, chat_template=template), names=("replay",)) as server:
        yield server
        server.wait_idle()


def test_what_is_said_is_never_markup(tab):
    """By the user, and by the model, in its thoughts too: neither as it comes nor when it is read again."""
    nasty = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'
    text = f"<think>\n{nasty}\n</think>\n\nSo: {nasty}"
    with thinking_server(text) as server:
        page = opened(tab, server.url)
        page.run("at('probabilities').click()")  # this engine has none
        say(page, nasty, max_tokens=len(text))
        wait_for(page, 2)
        for _ in range(2):
            assert turns(page) == [["turn user", nasty], ["turn assistant", f"So: {nasty}"]] and listed(page) == [nasty[:60]]
            assert page.run("document.querySelector('.thinking .text').textContent") == nasty
            found = page.run("document.querySelectorAll('#chat img, #chat script, #list img, #list script').length")
            assert found == 0 and page.run("window.hit") is None and tab.errors == []
            page.reload()


def test_tokens_are_never_markup(page):
    assert texts_of(page, [("<b>x</b>", ["<b>", "x"])]) == [["<b>", 1], ["x", 1], "</b>"]
    assert texts_of(page, [("<b>x", ["odd", "x"])]) == ["<b>", ["x", 1], ""]


# ---- sampling, forms


def test_sliders_and_numbers(page):
    """One follows the other; without a number the model's own is taken."""
    slider = "at('top_p').parentElement.querySelector('[type=range]')"
    assert page.run("'top_p' in settings.fields()") is False and page.run(f"{slider}.parentElement.className") == "control unset"
    page.run(f"{slider}.value = 0.4; {slider}.dispatchEvent(new Event('input', {{ bubbles: true }}))")
    put(page, temperature=1.5, seed=7, top_k=3)
    assert page.run("settings.fields()") == {
        **{"logprobs": True, "top_logprobs": 5, "temperature": 1.5, "top_p": 0.4, "top_k": 3, "max_tokens": 512, "seed": 7},
    }
    assert page.run("at('temperature').parentElement.querySelector('[type=range]').value") == "1.5"
    put(page, top_p="")
    assert page.run("'top_p' in settings.fields()") is False
    say(page, "a", top_p=3)
    assert turns(page) == [] and page.run("[document.activeElement.id, at('input').value]") == ["top_p", "a"]
    assert "Top p" in page.run("at('spoken').textContent")


def test_answers_have_the_form_of_a_schema(page):
    schema = {"enum": ["Ada", "Alan"]}  # the alphabet's model would fill an object with blanks
    say(page, "a", temperature=0, max_tokens=100, schema=json.dumps(schema))
    wait_for(page, 2)
    assert json.loads(turns(page)[1][1]) in schema["enum"]


@pytest.mark.parametrize(("schema", "wrong"), [('{"type": ', "not JSON"), ("[1]", "must be an object")])
def test_a_schema_that_is_none(page, schema, wrong):
    page.wait("at('model').textContent === 'alphabet'")
    say(page, "a", schema=schema)
    assert wrong in page.run("at('schema_error').textContent") and page.run("at('schema').ariaInvalid") == "true"
    assert page.run("[at('form_of_answers').open, document.activeElement.id, at('input').value]") == [True, "schema", "a"]
    assert turns(page) == [] and not any("completions" in url for url in page.requests)
    put(page, schema="")
    assert page.run("at('schema_error').textContent") == ""


def test_a_schema_that_the_server_refuses(page):
    say(page, "a", temperature=0, max_tokens=4, schema='{"type": "nonsense"}')
    wait_for(page, 2)
    assert "response_format" in turns(page)[1][1]
    put(page, schema="")
    press_button(page, "Try again")
    wait_for(page, 2)
    assert turns(page) == [["turn user", "a"], ["turn assistant", "BCDE"]]


# ---- tokens, thinking


def likeliest(page) -> list[list[str]]:
    return page.run("[...at('likeliest').querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent))")


def expected(token: str) -> list[list[str]]:
    """The five likeliest tokens after one, written as the page writes them, and their probabilities."""
    logits = alphabet_model.logits(ord(token))
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return [[chr(i), f"{100 * shares[i]:.1f} %"] for i in np.argsort(-shares)[:5]]


def test_the_likeliest_tokens_are_shown_on_hover(page):
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    spans = "document.querySelectorAll('.assistant .token')"
    assert page.run(f"[...{spans}].map(e => e.textContent)") == list("BCDE")
    page.point(f"{spans}[1]")
    page.wait("!at('likeliest').hidden")
    shown, right = likeliest(page), expected("B")
    assert len(shown) == 5 and [share for _, share in shown] == [share for _, share in right]
    for (token, _), (name, _) in zip(shown, right, strict=True):
        assert token == name or not name.isascii() or not name.isprintable() or name in '"\\ '
    assert shown[0][0] == "C" and page.run("at('likeliest').querySelector('tr.chosen th').textContent") == "C"
    page.point("at('input')")
    page.wait("at('likeliest').hidden")


def test_the_arrow_keys_tell_the_likeliest_tokens(page):
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    page.run("document.querySelector('.assistant [tabindex]').focus()")
    for key, token in (("ArrowRight", "B"), ("ArrowRight", "C"), ("End", "E"), ("ArrowLeft", "D"), ("Home", "B")):
        page.press(key)
        assert page.run("document.querySelector('.token.chosen').textContent") == token
        share = expected(chr(ord(token) - 1))[0][1]
        assert page.run("at('spoken').lastElementChild.textContent").startswith(f'"{token}" {share}, others: ')
    page.press("Escape")
    assert page.run("at('likeliest').hidden && document.querySelector('.token.chosen') === null")


def test_without_probabilities(page):
    page.run("at('probabilities').click()")
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    assert page.run("document.querySelectorAll('.token').length") == 0 and turns(page)[1][1] == "BCDE"


def texts_of(page, parts: list[tuple[str, list]]) -> list:
    """The spans, and the rest, of a TokenText to which texts and tokens (texts, or bytes) come in these parts."""
    entries = [
        (
            text,
            [
                {"token": "?", "bytes": t, "logprob": -1} if isinstance(t, list) else {"token": t, "bytes": None, "logprob": -1}
                for t in tokens
            ],
        )
        for text, tokens in parts
    ]
    return page.run(f"""(() => {{
        const queue = new TokenQueue(), shown = new TokenText({{}});
        for (const [text, tokens] of {json.dumps(entries)}) {{ queue.add(tokens); shown.add(text, queue); }}
        return [...shown.element.childNodes].map(n => n.tagName ? [n.textContent, shown.entriesOf(n).length] : n.data);
    }})()""")


def test_tokens_are_found_in_the_text(page):
    euro = list("€".encode())
    assert texts_of(page, [("He", ["He"]), ("llo", ["llo"])]) == [["He", 1], ["llo", 1], ""]
    assert texts_of(page, [("", [euro[:1]]), ("", [euro[1:2]]), ("€", [euro[2:]])]) == [["€", 3], ""]  # a character of three tokens
    assert texts_of(page, [("", ["<think>", "\n"]), ("hm", ["hm"])]) == [["hm", 1], ""]  # marks and blanks are no text
    assert texts_of(page, [("", ["ST"]), ("STOW", ["OW"])]) == [["ST", 1], ["OW", 1], ""]  # held back: it might have been "STOP"
    assert texts_of(page, [("so", ["so"]), ("", [" ST"]), (" ", ["OP"])]) == [["so", 1], " "]  # it was
    assert texts_of(page, [("Hi", ["Hi"]), (" you", ["you"])]) == [["Hi", 1], [" you", 1], ""]  # SentencePiece
    assert texts_of(page, [("", ["<think>"]), ("Hel", [" Hello"]), ("lo you", [" you"])]) == [["Hello", 1], [" you", 1], ""]
    assert texts_of(page, [("what", ["odd"]), (" is it", [" is", " it"])]) == ["what", [" is", 1], [" it", 1], ""]  # found again
    assert texts_of(page, [("hm\nso", ["<think>", "\n", "hm", "\n", "so"])]) == [["hm", 1], ["\n", 1], ["so", 1], ""]
    assert texts_of(page, [("plain", [])]) == ["plain"]
    assert texts_of(page, [("other", ["text", "than"])]) == ["other"]


def test_thinking_is_folded(tab):
    text = "<think>\nhm\n</think>\n\nLet me see."
    with thinking_server(text) as server:
        page = opened(tab, server.url)
        page.run("at('probabilities').click()")  # this engine has none
        say(page, "?", max_tokens=len(text))
        wait_for(page, 2)
        assert turns(page)[1] == ["turn assistant", "Let me see."]
        shown = "(e => [e.open, e.hidden, e.querySelector('summary').textContent, e.querySelector('.text').textContent])"
        assert page.run(f"{shown}(document.querySelector('.thinking'))") == [False, False, "Thought", "hm"]
        page.reload()
        assert page.run(f"{shown}(document.querySelector('.thinking'))") == [False, False, "Thought", "hm"]


# ---- the keyboard, screen readers, colours


def test_the_keyboard_alone(page, server, shared_llm, monkeypatch):
    page.wait("document.activeElement.id === 'input'")
    put(page, temperature=0, max_tokens=4)
    page.run("at('input').focus()")
    page.type("a")
    page.press("Enter", SHIFT)
    page.type("b")
    assert page.run("at('input').value") == "a\nb"
    page.press("Enter", CONTROL)
    wait_for(page, 2)
    assert turns(page) == [["turn user", "a\nb"], ["turn assistant", "BCDE"]]
    assert page.run("[document.activeElement.id, at('input').value]") == ["input", ""]
    page.press("Tab", SHIFT)
    assert page.run("document.activeElement.textContent") == "Regenerate"
    slow_down(monkeypatch, shared_llm)
    put(page, max_tokens=150)
    page.press("Enter")
    page.wait("(document.querySelector('.assistant > .text')?.textContent.length ?? 0) > 5")
    page.press("Enter")  # says nothing and stops nothing
    assert not page.run(IDLE)
    page.press("Escape")
    page.wait(IDLE)
    monkeypatch.undo()
    page.press("Tab", SHIFT)
    page.press("Tab", SHIFT)
    assert page.run("document.activeElement.className") == "text"  # whose tokens the arrow keys walk
    page.run("at('new').focus()")
    page.press("Tab", SHIFT)
    assert page.run("document.activeElement.className") == "skip"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "input"
    server.wait_idle()


def test_a_screen_reader_hears_whole_sentences(page):
    page.run("for (const part of ['One', ' two. Th', 'ree? Fo', 'ur']) announcer.add(part)")
    lines = "[...at('spoken').children].map(e => e.textContent)"
    assert page.run(lines) == ["One two.", "Three?"]
    page.run("announcer.end()")
    assert page.run(lines) == ["One two.", "Three?", "Four"]
    say(page, "a", temperature=0, max_tokens=4)
    wait_for(page, 2)
    assert page.run(lines)[3:] == ["The model answers.", "BCDE", "The answer is complete."]
    page.run("for (let i = 0; i < 50; i++) announcer.say(i)")
    assert page.run("at('spoken').childElementCount") == 20


def lightness(page) -> float:
    colour = page.run("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def test_dark_as_the_system_and_as_asked(page):
    assert lightness(page) > 200
    page.prefer("dark")
    assert lightness(page) < 60
    put(page, theme="light")
    assert lightness(page) > 200
    page.reload()
    assert lightness(page) > 200
    put(page, theme="dark")
    page.prefer("light")
    assert lightness(page) < 60


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core (npm install --no-save axe-core, or AXE_CORE=<its axe.min.js>)")
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_serious(page, colours):
    page.prefer(colours)
    put(page, temperature=0, max_tokens=4, schema="{")
    page.run("at('form_of_answers').open = true")
    put(page, schema="")
    say(page, "a")
    wait_for(page, 2)
    say(page, "a" * 400)
    wait_for(page, 4)
    page.point("document.querySelector('.token')")
    page.wait("!at('likeliest').hidden")
    page.run(AXE.read_text() + "; 0")
    found = page.run("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html)]))")
    assert [one for one in found if one[0] in ("serious", "critical")] == []
