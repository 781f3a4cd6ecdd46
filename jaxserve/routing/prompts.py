"""What of a request's body decides which prefixes it shares, as blocks for a policy (policy.py). Nothing is tokenised."""

from __future__ import annotations

import hashlib

import msgspec

from jaxserve.routing.policy import hash_blocks

# Bytes of a prompt's JSON that are hashed together (about 64 tokens of English, a page); most blocks that are hashed of a prompt.
BLOCK_BYTES, MAX_BLOCKS = 256, 4096
PROMPTED = (  # requests that have a prompt
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"),
    *("/v1/responses", "/v1/messages", "/inference/v1/generate", "/invocations"),
)


class _Prompted(msgspec.Struct):
    """The fields of a request's JSON that decide which prefixes it shares, as they were sent."""

    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")


_BEGINS = ("tools", "system", "instructions", "messages", "prompt", "input", "token_ids")  # a prompt's parts, in its order


_decoder = msgspec.json.Decoder(_Prompted)


def prompt_blocks(path: str | None, body: bytes) -> list[bytes]:
    """The hashes of a prompt's blocks; none where there is no prompt, or no JSON (the server will refuse it).

    A text, token ids or a chat are hashed as the JSON that was sent, since a client writes equal prefixes alike. Several prompts
    are hashed in order, so the first one counts most.

    path: where it was sent: prompts of different paths share nothing, and others than PROMPTED have none. None: nobody knows.
    """
    if path is not None and path not in PROMPTED:
        return []
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return []
    prompt = b"".join(bytes(getattr(asked, name)) for name in _BEGINS)
    root = b"\0".join(((path or "").encode(), asked.model, asked.cache_salt, asked.chat_template_kwargs))
    return hash_blocks(prompt, BLOCK_BYTES, hashlib.blake2b(root, digest_size=16).digest(), MAX_BLOCKS)
