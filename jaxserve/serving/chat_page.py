"""The chat page: one document, made of the files of `page/`, and the headers that let it ask this server and nobody else.

One document needs one route, which a key may be left out for, and no part of it can come from another version of the server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_STYLE, _SCRIPT = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">'), re.compile(r'<script src="(\w+\.js)"></script>')


@dataclass(frozen=True)
class ChatPage:
    """The document and the headers that it is sent with."""

    text: str
    headers: Mapping[str, str]


def read_chat_page() -> ChatPage:
    """The page, its style sheet and scripts written into it, each allowed by its hash (Content Security Policy Level 3)."""
    folder, hashes = resources.files("jaxserve.serving").joinpath("page"), dict[str, list[str]](style=[], script=[])

    def written(kind: str, name: str) -> str:
        text = folder.joinpath(name).read_text(encoding="utf-8")
        assert f"</{kind}" not in text, f"{name} would end its own element"
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    text = _STYLE.sub(lambda found: written("style", found[1]), text)
    text = _SCRIPT.sub(lambda found: written("script", found[1]), text)
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return ChatPage(text, headers)
