"""What tests of the chat page do with a page in a browser's tab."""

import json

import pytest

from tests.serving.browser import CHROMIUM

NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package of that name)")
IDLE = "document.getElementById('send').textContent === 'Send'"


def opened(tab, url: str):
    """The tab with the page of a server, nothing being kept."""
    tab.prefer("light")
    tab.open(url)
    tab.run("localStorage.clear(); sessionStorage.clear()")
    tab.open("about:blank")
    tab.requests.clear()
    tab.errors.clear()
    tab.open(url)
    return tab


def put(page, **values) -> None:
    """Sets fields as a user does."""
    for name, value in values.items():
        page.run(
            f"at({name!r}).value = {json.dumps(str(value))}; at({name!r}).dispatchEvent(new Event('input', {{ bubbles: true }}))"
        )


def say(page, text: str, **values) -> None:
    put(page, **values)
    page.run(f"at('input').value = {json.dumps(text)}; at('form').requestSubmit()")


def turns(page) -> list[list[str]]:
    """[class, text] of each; of an answer without its figures and buttons."""
    text = "(e.querySelector(':scope > .text, p') ?? e).textContent"
    return page.run(f"[...document.querySelectorAll('.turn')].map(e => [e.className, {text}])")


def wait_for(page, num_turns: int) -> None:
    page.wait(f"{IDLE} && document.querySelectorAll('.turn').length === {num_turns}")


def press_button(page, text: str) -> None:
    page.run(f"[...document.querySelectorAll('.actions button')].find(b => b.textContent === {text!r}).click()")


def listed(page) -> list[str]:
    return page.run("[...document.querySelectorAll('#list .open')].map(e => e.textContent)")


def kept(page) -> list[list[str]]:
    """What the browser has stored of each conversation."""
    stored = page.run("Object.keys(localStorage).filter(k => k.includes('conversation')).map(k => localStorage[k])")
    return [[message["content"] for message in json.loads(one)["messages"]] for one in stored]
