"""`/v1/chat/completions/batch`: a choice for each conversation."""

from tests.serving.calls import ok, refusal

CHAT = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def post(server, *said, **body):
    messages = [[{"role": "user", "content": text}] for text in said]
    return server.client.post("/v1/chat/completions/batch", json={"messages": messages, "temperature": 0, "max_tokens": 2} | body)


def test_a_choice_for_each(server):
    answer = ok(post(server, "a", "xyz", chat_template_kwargs={"opening": "M"}, logprobs=True))
    assert [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]] == [(0, "NO"), (1, "NO")]
    assert all(len(choice["logprobs"]["content"]) == 2 for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == len("u:a;M" + "u:xyz;M") and answer["usage"]["completion_tokens"] == 4


def test_patterns_end_each(server):
    body = CHAT | {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}
    answer = ok(post(server, "a", "b", **body | {"messages": [[{"role": "user", "content": text}] for text in "ab"]}))
    assert answer["choices"][0] == ok(server.client.post("/v1/chat/completions", json=body))["choices"][0]


def test_a_form_for_each(server):
    answer = ok(post(server, "a", "b", structured_outputs={"choice": ["XY"]}, max_tokens=9))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["XY", "XY"]


def test_refusals(server):
    for change in ({"stream": True}, {"n": 2}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"messages": []}):
        (name,) = change
        assert refusal(post(server, "a", **change))["param"] == name
    assert "characters" in refusal(post(server, "a", "b" * 5000))["message"], "one that can't be served refuses all"
    server.wait_idle()
