"""jaxserve.cli.chat, with a model in its process and with a server, spoken to through a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jaxserve.text.tokenizer import Tokenizer
from scripts.bench.replay_engine import replay_llm
from tests import alphabet_model
from tests.serving.http_server import listening, serving

ROOT = Path(__file__).parents[2]
LIMITS = ("--max_num_seqs=2", "--max_num_batched_tokens=16", "--num_pages=64", "--page_size=8")


def chat(said: str, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "jaxserve.cli.chat", "--temperature=0", "--max_tokens=4", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, input=said, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_in_process(folder, tmp_path):
    done = chat("a\n\n/new\nx\n/quit\nnever\n", tmp_path, f"--model={folder}", *LIMITS)
    assert done.returncode == 0 and done.stdout == "BCDE\nBCDE\n", done.stderr


def test_with_a_server(shared_llm, tmp_path):
    with serving(shared_llm, options={"api_keys": ("k",)}) as server:
        done = chat("a\n", tmp_path, f"--url={server.url}", "--api_key=k", "--system=s")
        assert done.returncode == 0 and done.stdout == "BCDE\n", done.stderr
        done = chat("a" * 400 + "\na\n", tmp_path, f"--url={server.url}/v1", "--api_key=k")
        assert done.stdout == "BCDE\n" and "max_model_len" in done.stderr, "a message that is too long is taken back"
        done = chat("a\n", tmp_path, f"--url={server.url}")
        assert done.returncode == 1 and "no valid API key" in done.stderr


def test_reasoning_is_shown_and_not_said_again(tmp_path, monkeypatch):
    """By a model that says the same every time; its template would take whatever it is given."""
    heard, apply = [], Tokenizer.apply_chat_template

    def overheard(self, messages, *args, **kwargs):
        heard.append([(message["role"], message["content"]) for message in messages])
        return apply(self, messages, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", overheard)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    model = replay_llm(8, text="hm</think>Yes.", chat_template=template + "{# </think> #}")
    with serving(model, names=("replay",)) as server:
        done = chat("a\nb\n", tmp_path, f"--url={server.url}", "--max_tokens=14")
    assert done.returncode == 0 and done.stdout == "hm\n\nYes.\n" * 2, done.stderr
    assert heard[-1] == [("user", "a"), ("assistant", "Yes."), ("user", "b")]


def test_a_server_that_goes_away(tmp_path):
    """It is said, and what was asked is taken back."""
    asked = []

    async def models(_: Request):
        return JSONResponse({"data": [{"id": "m"}]})

    async def completions(request: Request):
        asked.append([message["content"] for message in (await request.json())["messages"]])

        async def events():
            yield 'data: {"choices": [{"delta": {"content": "par"}}]}\n\n'
            raise RuntimeError("gone, on purpose")

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", completions, methods=["POST"])]
    with listening(Starlette(routes=routes)) as url:
        done = chat("a\nb\n", tmp_path, f"--url={url}")
    assert done.returncode == 0 and done.stdout == "par\npar\n" and asked == [["a"], ["b"]]
    assert done.stderr.count(f"jaxserve chat: {url}") == 2 and "Traceback" not in done.stderr
    done = chat("a\n", tmp_path, f"--url={url}")
    assert done.returncode == 1 and done.stderr.startswith(f"jaxserve chat: {url}") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_folder_without_a_tokenizer(tmp_path):
    """What is missing is said, and no option that the script does not have."""
    bare = alphabet_model.save(tmp_path / "bare", tokenizer=False)
    done = chat("a\n", tmp_path, f"--model={bare}", *LIMITS)
    assert done.returncode == 1 and done.stderr.startswith(f"jaxserve chat: {bare} has no tokenizer.json")
    assert "skip_tokenizer_init" not in done.stderr
