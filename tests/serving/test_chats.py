"""`/v1/chat/completions` on the model whose greedy output can be written down."""

from tests.serving.calls import chat, chunks, ok


def test_a_chat(server):
    answer = ok(chat(server))
    (choice,) = answer["choices"]
    assert (
        choice["message"] == {"role": "assistant", "content": "BCDE", "reasoning": None, "refusal": None}
        and choice["finish_reason"] == "length"
    )
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len("u:tea;A")


def test_chat_stream(server):
    streamed = chunks(chat(server, stream=True, n=2, stream_options={"include_usage": True}))
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["completion_tokens"] == 8
    for i in (0, 1):
        deltas = [c["choices"][0] for c in streamed[:-1] if c["choices"][0]["index"] == i]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(d["delta"].get("content", "") for d in deltas) == "BCDE"
        assert [d["finish_reason"] for d in deltas] == [None] * 4 + ["length"]


def test_chat_ends_where_the_model_ends_without_a_limit(server):
    answer = ok(server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "temperature": 0}))
    assert answer["choices"][0]["finish_reason"] == "stop", "eos comes 191 tokens after 'A', before the model's length"


def test_chat_logprobs(server):
    for stream in (False, True):
        response = chat(server, logprobs=True, top_logprobs=2, stream=stream)
        parts = chunks(response) if stream else [ok(response)]
        content = [t for c in parts for t in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [t["token"] for t in content] == list("BCDE") and [t["bytes"] for t in content] == [[b] for b in b"BCDE"]
        assert [len(t["top_logprobs"]) for t in content] == [2] * 4
        assert content[0]["top_logprobs"][0]["token"] == "B" and content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    assert [t["top_logprobs"] for t in ok(chat(server, logprobs=True))["choices"][0]["logprobs"]["content"]] == [[]] * 4


def test_messages_and_template(server):
    said = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": "z", "refusal": None},
        {"role": "user", "content": "q"},
    ]
    asked = {"messages": said, "chat_template_kwargs": {"opening": "M"}}
    tokens = ok(server.client.post("/tokenize", json=asked))
    assert bytes(tokens["tokens"]).decode() == "s:d;u:x\ny;a:z;u:q;M"
    assert ok(chat(server, said, chat_template_kwargs={"opening": "M"}))["choices"][0]["message"]["content"] == "NOPQ"
    assert ok(chat(server, said, add_generation_prompt=False))["usage"]["prompt_tokens"] == len("s:d;u:x\ny;a:z;u:q;")


def test_max_completion_tokens(server):
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_completion_tokens": 2}
    assert ok(server.client.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"] == "BC"
