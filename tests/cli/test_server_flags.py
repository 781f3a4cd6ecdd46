"""Flags of `jaxserve serve` under vLLM's names: what they become, and what is refused before a model is loaded."""

import json
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from absl import flags
from absl.testing import flagsaver

from jaxserve import SamplingParams
from jaxserve.cli.common import server_flags
from jaxserve.serving.launch import default_sampling_params
from jaxserve.serving.options import CrossOrigin, ModelOptions, ServerOptions
from tests import alphabet_model
from tests.cli.commands import MODULES


@pytest.fixture
def given():
    """Sets flags for one test."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver():
        yield lambda **values: [setattr(flags.FLAGS, name, value) for name, value in values.items()]


def options() -> ServerOptions:
    return ServerOptions(names=("m",), **server_flags.answer_options())


def model() -> ModelOptions:
    return ModelOptions(model="m", **server_flags.model_options())


def test_without_flags_answers_are_as_vllms(given):
    assert options() == ServerOptions(names=("m",)) and model().chat_template is None


def test_flags_become_options(given):
    switches = ("enable_prompt_tokens_details", "enable_force_include_usage", "return_tokens_as_token_ids")
    switches += ("enable_request_id_headers", "trust_request_chat_template", "vllm_metric_names", "enable_log_requests")
    texts = {"response_role": "cat", "root_path": "/a", "max_log_len": 3, "middleware": ["a.B"], "sse_keep_alive_interval": 2.5}
    given(
        **dict.fromkeys(switches, True), **texts, default_chat_template_kwargs='{"x": 1}', allowed_origins='["https://a.example"]'
    )
    made = options()
    assert all(getattr(made, name) for name in switches) and made.middleware == ("a.B",)
    assert (made.response_role, made.root_path, made.max_log_len, made.sse_keep_alive_interval) == ("cat", "/a", 3, 2.5)
    assert made.default_chat_template_kwargs == {"x": 1} and made.cross_origin == CrossOrigin(origins=("https://a.example",))


@pytest.mark.parametrize(
    "values,said",
    [
        ({"default_chat_template_kwargs": "{"}, "--default_chat_template_kwargs={ is not JSON"),
        ({"default_chat_template_kwargs": "[]"}, "must be a JSON object of template variables"),
        ({"allowed_origins": "*"}, "--allowed_origins=\\* is not JSON"),
        ({"allowed_methods": '["GET"]'}, "give --allowed_origins too"),
        ({"allow_credentials": True}, "--allow_credentials is about pages of other origins"),
        ({"root_path": "a/"}, "root_path='a/' must begin with a slash"),
        ({"response_role": ""}, "response_role must not be empty"),
    ],
)
def test_what_can_not_be_read_is_refused(given, values, said):
    given(**values)
    with pytest.raises(ValueError, match=said):
        options()


def test_default_sampling(given):
    recommended = SamplingParams(temperature=0.6, top_k=20)
    llm: Any = SimpleNamespace(get_default_sampling_params=lambda: recommended)
    assert default_sampling_params(llm, model()) == recommended
    given(override_generation_config='{"temperature": 0.1, "min_p": 0.2}')
    assert default_sampling_params(llm, model()) == recommended.with_(temperature=0.1, min_p=0.2)
    given(generation_config="vllm")
    assert default_sampling_params(llm, model()) == SamplingParams(temperature=0.1, min_p=0.2)
    penalties: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    given(override_generation_config=json.dumps(penalties | {"max_new_tokens": 3}))
    assert default_sampling_params(llm, model()) == SamplingParams(max_tokens=3, **penalties) and model().max_new_tokens == 3
    for value, said in (
        ('{"min_tokens": 3}', "min_tokens is not taken"),
        ('{"top_p": 7}', "override_generation_config: top_p=7 must be"),
        ('{"max_new_tokens": 0}', "override_generation_config: max_new_tokens=0 must be"),
    ):
        given(override_generation_config=value)
        with pytest.raises(ValueError, match=said):
            model()


def test_a_chat_template_is_a_file_or_source(given, tmp_path):
    given(chat_template="{{ messages }}")
    assert model().chat_template == "{{ messages }}"
    (tmp_path / "mine.jinja").write_text("{{ 1 }}")
    given(chat_template=str(tmp_path / "mine.jinja"))
    assert model().chat_template == "{{ 1 }}"
    given(chat_template=str(tmp_path / "nosuch.jinja"))
    with pytest.raises(ValueError, match="nosuch.jinja' is neither Jinja source nor a file"):
        model()


def listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


@pytest.mark.slow
def test_a_server_on_a_unix_socket_with_a_template_of_its_own(tmp_path):
    folder, path = alphabet_model.save(tmp_path / "model"), str(tmp_path / "socket")
    asked = [f"--uds={path}", "--chat-template={{ messages[0].content }}x", "--page_size=4", "--num_pages=16", "--max_num_seqs=2"]
    asked += ["--override-generation-config", '{"temperature": 0.0}', "--vllm_metric_names", "--enable-request-id-headers"]
    process = subprocess.Popen([sys.executable, "-m", MODULES["serve"], f"--model={folder}", *asked])
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://server", timeout=60) as client:
            deadline = time.monotonic() + 120
            while not listens(path):
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
            body = {"messages": [{"role": "user", "content": "tea"}], "max_tokens": 3}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "yz{" and answer.headers["x-request-id"]
            assert "vllm:generation_tokens_total" in client.get("/metrics").text
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", 8000)) != 0, "no port is open"
    finally:
        process.terminate()
        process.wait(60)
