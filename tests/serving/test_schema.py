"""schemathesis, with all its default checks, against the published schema: what it allows is served, what it forbids is refused.

SCHEMA_EXAMPLES is the number of examples an operation; where it is not set, 5 random ones are tried, and the systematic phase,
which takes 20 s, is left out. `make fuzz-api` does everything, with 100.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest

from jaxserve import LLM, BucketPlan
from jaxserve.routing.app import CONTROL_PATHS
from tests import alphabet_model
from tests.serving.http_server import Server, serving

ROOT = Path(__file__).parents[2]
PLAN = BucketPlan(decode=(4,), mixed=((64, 4),), head_rows=(4,))
WITH_TOOLS = "{% if tools %}<tool_call>{% endif %}" + alphabet_model.CHAT_TEMPLATE
TOOLS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize")

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "5"))
PHASES = () if "SCHEMA_EXAMPLES" in os.environ else ("--phases=fuzzing",)


def saved(folder: Path, chat_template: str = alphabet_model.CHAT_TEMPLATE) -> Path:
    """A model that is long enough for any prompt that is tried: a schema can't count tokens."""
    return alphabet_model.save(folder, max_position_embeddings=1536, chat_template=chat_template)


def load(folder: Path) -> LLM:
    return LLM(folder, bucket_plan=PLAN, num_pages=384, page_size=16, compilation_cache_dir="")


TOO_HARD = "Cannot generate an array with 1 demanded elements"  # schemathesis 4.32's own words: these bodies it can't make


def fuzz(server: Server, folder: Path, *flags: str, tested: int, **environment: str) -> None:
    """Tries so many operations; none may fail."""
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json", f"--max-examples={EXAMPLES}"]
    seeded = [*command, *PHASES, "--seed=1", "--output-sanitize=false", "--request-timeout=60", *flags]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.serving.schema_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        seeded, cwd=folder, env=os.environ | hooks | environment, capture_output=True, text=True, timeout=300 + 30 * EXAMPLES
    )
    (folder / "schemathesis.txt").write_text(done.stdout)  # all of it, for who looks for the first of many failures
    only_errors = "= FAILURES =" not in done.stdout and set(re.findall(r"^Schema Error\n\n(.+)$", done.stdout, re.M)) == {TOO_HARD}
    assert done.returncode == 0 or only_errors, done.stdout[-6000:]
    assert f"Tested: {tested}\n" in done.stdout, done.stdout[-6000:]


@pytest.mark.slow
def test_schemathesis(tmp_path):
    with serving(load(saved(tmp_path / "model"))) as server:
        fuzz(server, tmp_path, tested=25)
        server.wait_idle()
        assert server.engine.stats.num_failures == 0


@pytest.mark.slow
def test_chats_with_tools(tmp_path):
    """By a model whose template has them: tool_choice, strict functions, forms beside tools."""
    with serving(load(saved(tmp_path / "model", chat_template=WITH_TOOLS))) as server:
        components = server.client.get("/openapi.json").json()["components"]
        allowed = jsonschema_rs.validator_for({"$ref": "#/components/schemas/ChatRequest", "components": components})
        for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "f"}}):
            for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
                body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tool_choice": choice, "tools": tools}
                status = server.client.post("/v1/chat/completions", json=body).status_code
                assert status == (200 if allowed.is_valid(body) else 400), body
        fuzz(server, tmp_path, *(f"--include-path={path}" for path in TOOLS), tested=len(TOOLS))
        server.wait_idle()
        assert server.engine.stats.num_failures == 0


@pytest.mark.slow
def test_control_routes(tmp_path, monkeypatch):
    """With the key, in any order: the engine is paused, asleep or neither. A path is a checkpoint's, or leads nowhere."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = saved(tmp_path / "model")
    with serving(load(folder), options={"api_keys": ("k",), "enable_control": True}) as server:
        paths = [f"--include-path={path}" for path in CONTROL_PATHS]
        fuzz(server, tmp_path, "--header=Authorization: Bearer k", *paths, tested=len(CONTROL_PATHS), SCHEMA_CHECKPOINT=str(folder))
        assert server.engine.stats.num_failures == 0 and server.client.get("/health").status_code == 200
