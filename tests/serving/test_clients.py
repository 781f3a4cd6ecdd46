"""Clients that others wrote, on localhost: the `openai` package with its streaming helpers, vLLM's load generator."""

import asyncio
import json
import subprocess

import openai
import pytest

from tests import real_files
from tests.alphabet_model import after
from tests.serving.http_server import serving

SAID = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def server(shared_llm):
    with serving(shared_llm, options={"api_keys": ("secret",)}) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client
    server.wait_idle()


def test_completions(client):
    assert [model.id for model in client.models.list()] == ["alphabet"]
    answer = client.completions.create(model="alphabet", prompt=["a", "x"], max_tokens=2, temperature=0, logprobs=1, echo=False)
    assert [choice.text for choice in answer.choices] == ["bc", "yz"] and answer.usage and answer.usage.total_tokens == 6
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.tokens == ["b", "c"]
    stream = client.completions.create(model="alphabet", prompt="a", max_tokens=9, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == after("a", 9)


def test_chats(client):
    answer = client.chat.completions.create(
        model="alphabet", messages=SAID, max_completion_tokens=3, temperature=0, n=2, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert [choice.message.content for choice in answer.choices] == ["BCD"] * 2
    stream = client.chat.completions.create(
        model="alphabet", messages=SAID, max_tokens=3, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "BCD"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 3


def test_the_streaming_helper(client):
    with client.chat.completions.stream(model="alphabet", messages=SAID, stop="F", temperature=0, logprobs=True) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") >= 4 and "content.done" in kinds and "logprobs.content.done" in kinds
    assert final.choices[0].message.content == "BCDE" and final.choices[0].finish_reason == "stop"


def test_an_answer_can_be_sent_back(client):
    answer = client.chat.completions.create(model="alphabet", messages=SAID, max_tokens=3, temperature=0)
    messages = [*SAID, answer.choices[0].message, {"role": "user", "content": "x"}]
    again = client.chat.completions.create(model="alphabet", messages=messages, max_tokens=3, temperature=0)
    assert again.usage and again.usage.prompt_tokens == len("u:a;a:BCD;u:x;A")


def test_errors(client, server):
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model="alphabet", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_many_at_once(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(
                    model="alphabet", prompt="a", max_tokens=1 + i % 25, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(64)))

    assert asyncio.run(main()) == [after("a", 1 + i % 25) for i in range(64)]


def test_vllms_load_generator(server, folder, tmp_path):
    """Random token ids: a byte's token that is no text of its own can't be sent as text."""
    flags = ["--prompt-token-ids", "--base-url", server.url, "--header", "Authorization=Bearer secret", "--tokenizer", folder]
    flags += [
        "--random-input-len",
        "16",
        "--random-output-len",
        "16",
        "--num-prompts",
        "12",
        "--max-concurrency",
        "6",
        "--ignore-eos",
    ]
    flags += ["--disable-tqdm", "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"]
    command = [real_files.vllm_rs(), "bench", "serve", "--dataset-name", "random", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (12, 0, 12 * 16)
    server.wait_idle()
