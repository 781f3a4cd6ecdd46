"""Keys from a file: what the file may say, what a key may spend, and what a server makes of both."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.responses import PlainTextResponse

from jaxserve.routing.app import make_router
from jaxserve.routing.options import RouterOptions
from jaxserve.serving.keys import ApiKey, KeyLimitError, KeyRing, KeyUse, ShownKey, read_keys
from jaxserve.serving.middleware import KeyCheck
from jaxserve.serving.options import HTTPOptions, ServerOptions
from tests.alphabet_model import after
from tests.serving.calls import ok, refusal
from tests.serving.http_server import Server, serving, slow_down

SECRET = "sk-a-secret"
SHA256 = hashlib.sha256(SECRET.encode()).hexdigest()


def write(path: Path, *keys: Any) -> str:
    path.write_text(json.dumps(keys) if path.suffix == ".json" else yaml.safe_dump(list(keys)))
    return str(path)


# ---- the file


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_a_file_of_keys(tmp_path, name):
    limits: dict[str, Any] = {"requests_per_minute": 2, "tokens_per_minute": 30, "max_concurrent_requests": 4, "max_connections": 5}
    path = write(tmp_path / name, {"name": "a", "key": SECRET} | limits, {"name": "b.2", "sha256": SHA256.upper()[::-1]})
    first, second = read_keys(path)
    assert first == ApiKey(name="a", digest=bytes.fromhex(SHA256), **limits)
    assert second == ApiKey(name="b.2", digest=bytes.fromhex(SHA256[::-1])) and not second.may_control


@pytest.mark.parametrize(
    "keys, said",
    [
        ([], "must hold a list of keys, one at least"),
        (["a"], "key 1: must be an object"),
        ([{"key": SECRET}], "name=None must be a text"),
        ([{"name": "a b", "key": SECRET}], "name='a b' must be a text of 1 to 64"),
        ([{"name": "a"}], "a must have one of key and sha256"),
        ([{"name": "a", "key": SECRET, "sha256": SHA256}], "a must have one of key and sha256"),
        ([{"name": "a", "key": 1234}], "key of a must be a text that is not empty; quotes make a number one"),
        ([{"name": "a", "key": ""}], "key of a must be a text that is not empty"),
        ([{"name": "a", "sha256": SECRET}], "sha256 of a must be 64 hexadecimal digits"),
        ([{"name": "a", "sha256": hashlib.sha256().hexdigest()}], "sha256 of a is that of an empty text: was the variable set"),
        ([{"name": "a", "key": SECRET, "rpm": 3}], "rpm is not known; it may have key, max_concurrent_requests"),
        ([{"name": "a", "key": SECRET, "requests_per_minute": 0}], "requests_per_minute=0 of a must be a whole number above 0"),
        ([{"name": "a", "key": SECRET, "tokens_per_minute": True}], "tokens_per_minute=True of a must be a whole number"),
        ([{"name": "a", "key": SECRET, "may_control": "yes"}], "may_control='yes' of a must be true or false"),
        ([{"name": "a", "key": SECRET}, {"name": "a", "key": "x"}], "key 2 has the name of one before it"),
        ([{"name": "a", "key": SECRET}, {"name": "b", "sha256": SHA256}], "key 2 has the value of one before it"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, keys, said):
    with pytest.raises(ValueError, match=said) as wrong:
        read_keys(write(tmp_path / "keys.yaml", *keys))
    assert SECRET not in str(wrong.value) and "keys.yaml" in str(wrong.value)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("keys.yaml", f"- name: a\n  key: {SECRET}: x\n", "is not YAML: mapping values are not allowed here in line 2"),
        ("keys.yaml", f"key: {SECRET}", "must hold a list of keys"),
        ("keys.json", f"- key: {SECRET}", "is not JSON"),
        ("keys.yaml", "", "must hold a list of keys"),
    ],
)
def test_what_is_no_file_of_keys(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said) as wrong:
        read_keys(tmp_path / name)
    assert SECRET not in str(wrong.value)
    with pytest.raises(ValueError, match="can't be read"):
        read_keys(tmp_path / "nothing.yaml")


# ---- limits


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def made(clock: Clock, **limits: Any) -> KeyUse:
    return KeyUse(ApiKey(name="a", digest=b"", **limits), clock)


def refused(use: KeyUse) -> KeyLimitError:
    with pytest.raises(KeyLimitError) as found:
        use.begin()
    return found.value


def test_requests_a_minute(clock):
    use = made(clock, requests_per_minute=6)
    for _ in range(6):
        use.begin()
    error = refused(use)
    assert (error.limit, error.retry_after) == (
        "requests_per_minute",
        10,
    ) and "its requests_per_minute=6; try again in 10 s" in str(error)
    clock.now += 9.9
    assert refused(use).retry_after == 1
    clock.now += 0.1
    use.begin()
    assert use.num_requests == 7 and use.num_refused["requests_per_minute"] == 2
    clock.now += 3600  # what is not used does not add up
    for _ in range(6):
        use.begin()
    refused(use)


def test_a_minute_never_has_more_than_two_minutes_worth(clock):
    """And in the long run it is what the limit says, whoever comes when."""
    rng, use, taken = random.Random(0), made(clock, requests_per_minute=30), []
    for _ in range(5000):
        clock.now += rng.choice([0, 0, 0.01, 0.5, 3])
        try:
            use.begin()
            taken.append(clock.now)
        except KeyLimitError:
            pass
    assert max(sum(start <= t < start + 60 for t in taken) for start in taken) <= 60
    minutes = (clock.now - 1000) / 60
    assert 30 * minutes <= len(taken) <= 30 * minutes + 30


def test_tokens_a_minute(clock):
    """A request costs what it turns out to cost; those that follow wait until that is made up."""
    use = made(clock, tokens_per_minute=60)
    use.begin()
    use.spend(100)
    error = refused(use)
    assert (error.limit, error.retry_after) == ("tokens_per_minute", 41) and use.num_tokens == 100
    clock.now += 41
    use.begin()


def test_requests_at_once(clock):
    use = made(clock, max_concurrent_requests=2)
    use.begin()
    use.hold()
    assert refused(use).limit == "max_concurrent_requests"
    use.end()
    use.begin()


def test_a_file_is_read_again(tmp_path, clock, caplog):
    path = write(tmp_path / "keys.yaml", {"name": "a", "key": "1", "requests_per_minute": 2}, {"name": "b", "key": "2"})
    ring = KeyRing(("0",), path, clock=clock)
    a, b = ring.named
    assert ring.find([b"1"]) is a and ring.find([b"", b"2"]) is b and ring.find([b"3"]) is None
    a.begin()
    a.begin()
    refused(a)
    write(tmp_path / "keys.yaml", {"name": "a", "key": "3", "requests_per_minute": 1}, {"name": "c", "key": "4"})
    assert ring.reload() and ring.find([b"1"]) is None and ring.find([b"2"]) is None
    assert ring.find([b"3"]) is a and a.num_requests == 2, "it keeps its name, and what it has used"
    clock.now += 59
    refused(a)
    clock.now += 1
    a.begin()
    caplog.clear()
    write(tmp_path / "keys.yaml", {"name": "a", "key": SECRET, "rpm": 1})
    assert not ring.reload() and ring.find([b"3"]) is a, "a file that is wrong changes nothing"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the keys stay as they were: ") and "rpm is not known" in line and SECRET not in line
    assert ring.find([b"0"]).key.name is None  # type: ignore[union-attr]


def test_keys_are_kept_hashed(tmp_path):
    ring = KeyRing((SECRET,), write(tmp_path / "keys.yaml", {"name": "a", "key": SECRET + "x"}))
    uses = [ring.find([SECRET.encode()]), ring.find([f"{SECRET}x".encode()])]
    assert SECRET not in repr([vars(ring), *(vars(use) for use in uses if use)])
    assert [use.key.digest.hex() for use in uses if use] == [SHA256, hashlib.sha256(f"{SECRET}x".encode()).hexdigest()]


def test_all_keys_are_compared_whatever_is_given(monkeypatch):
    """By the function that takes as long for any two texts of one length, and none after the other."""
    compared: list[bytes] = []

    def watched(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return compare(given, known)

    compare = hmac.compare_digest
    monkeypatch.setattr("jaxserve.serving.keys.hmac.compare_digest", watched)
    ring = KeyRing(("1", "2", "3"))
    for token in (b"1", b"3", b"nothing", b"", b"x" * 5000):
        compared.clear()
        assert (ring.find([token]) is not None) == (token in (b"1", b"3"))
        assert len(compared) == 3 and {len(known) for known in compared} == {32}


def test_nothing_is_no_key():
    """Not even where it would be one."""
    ring = KeyRing(("1",))
    ring.named = (KeyUse(ApiKey(name="empty", digest=hashlib.sha256().digest())),)

    async def asked(headers: dict[str, str]) -> int:
        app = KeyCheck(PlainTextResponse("open"), ring, ())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return (await client.get("/", headers=headers)).status_code

    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic 1"}, {"X-Api-Key": ""}):
        assert asyncio.run(asked(headers)) == 401
    assert asyncio.run(asked({"Authorization": "Basic 1", "X-Api-Key": "1"})) == 200


# ---- a server


@pytest.fixture
def keyed(shared_llm, shared, tmp_path):
    """A server whose keys are "one", with the limits of a test, and "two"."""
    shared.wait_idle()
    path = tmp_path / "keys.yaml"

    def start(limits: dict[str, Any], **options: Any):
        write(path, {"name": "one", "key": "1"} | limits, {"name": "two", "key": "2"})
        return serving(shared_llm, options={"api_keys_file": str(path)} | options)

    return start


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked(server: Server, key: str, **body: Any) -> httpx.Response:
    given = {"prompt": "a", "temperature": 0, "max_tokens": 4} | body
    return server.client.post("/v1/completions", json=given, headers=bearer(key))


def metric(server: Server, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    (found,) = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"jaxserve:{name} ")]
    return found


def test_a_limit_is_told(keyed, caplog):
    with keyed({"requests_per_minute": 1}) as server, caplog.at_level("INFO"):
        ok(asked(server, "1", prompt="secret-prompt"))
        response = asked(server, "1")
        error = refusal(response, 429)
        assert error["code"] == "rate_limit_exceeded" and error["type"] == "rate_limit_error"
        assert "key 'one' has no request left, of its requests_per_minute=1" in error["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
        said = server.client.post("/v1/messages", json={}, headers={"x-api-key": "1"})
        assert said.status_code == 429 and said.json()["error"]["type"] == "rate_limit_error", "in Anthropic's form"
        ok(asked(server, "2"))
        refusal(asked(server, "3"), 401)
        assert metric(server, 'api_key_requests_total{key="one"}') == 1
        assert metric(server, 'api_key_refusals_total{key="one",limit="requests_per_minute"}') == 2
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxserve.access"]
    assert sum(re.search(r"/v1/completions 200 .* key=one$", line) is not None for line in lines) == 1
    assert sum(" 429 " in line and line.endswith("key=one") for line in lines) == 2
    assert "secret-prompt" not in caplog.text


@pytest.mark.slow
def test_tokens_are_those_of_the_usage(keyed):
    """Of whole answers, streams, samples and chats alike."""
    with keyed({"tokens_per_minute": 10**6}) as server:
        total = ok(asked(server, "1", prompt=["a", "tea"], n=2))["usage"]["total_tokens"]
        total += ok(asked(server, "1", use_beam_search=True, n=2, max_tokens=1))["usage"]["prompt_tokens"] + 1  # one beam's step
        body = {"messages": [{"role": "user", "content": "tea"}], "max_tokens": 3}
        total += ok(server.client.post("/v1/chat/completions", json=body, headers=bearer("1")))["usage"]["total_tokens"]
        text = asked(server, "1", stream=True, stream_options={"include_usage": True}).text
        total += json.loads(text.split("data: ")[-2])["usage"]["total_tokens"]
        assert metric(server, 'api_key_tokens_total{key="one"}') == total
        assert metric(server, 'api_key_tokens_total{key="two"}') == 0
        server.wait_idle()


def test_tokens_run_out(keyed):
    with keyed({"tokens_per_minute": 5}) as server:
        ok(asked(server, "1", max_tokens=20))
        response = asked(server, "1")
        assert "no token left, of its tokens_per_minute=5" in refusal(response, 429)["message"]
        assert int(response.headers["retry-after"]) > 60  # 16 tokens too many
        ok(asked(server, "2"))


@pytest.mark.slow
def test_streams_and_background_responses_count(keyed, shared_llm, monkeypatch):
    slow_down(monkeypatch, shared_llm)
    with keyed({"max_concurrent_requests": 1}) as server:
        long = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=long, headers=bearer("1")) as stream:
            lines = stream.iter_lines()  # kept: a generator that ends closes the connection
            next(lines)
            assert "1 requests under way, of its max_concurrent_requests=1" in refusal(asked(server, "1"), 429)["message"]
            ok(asked(server, "2"))
        server.wait_idle()
        background = {"input": "a", "max_output_tokens": 200, "background": True, "ignore_eos": True}
        made = ok(until_taken(lambda: server.client.post("/v1/responses", json=background, headers=bearer("1"))))
        refusal(asked(server, "1"), 429)
        ok(server.client.get(f"/v1/responses/{made['id']}", headers=bearer("1")))  # what it made is not out of reach
        ok(server.client.post(f"/v1/responses/{made['id']}/cancel", headers=bearer("1")))
        server.wait_idle()
        assert ok(until_taken(lambda: asked(server, "1")))["choices"][0]["text"] == after("a", 4)
        assert metric(server, 'api_key_requests_running{key="one"}') == 0


def test_connections_are_bounded_by_key(keyed):
    """Idle ones count, for the key that they have shown last, until they are closed."""
    with keyed({"max_connections": 2}) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(4)]

        def ask(client: httpx.Client, key: str) -> httpx.Response:
            return client.get("/v1/models", headers=bearer(key))

        for client in (clients[0], clients[1], clients[0]):  # the first one again: no other connection
            ok(ask(client, "1"))
        response = ask(clients[2], "1")
        assert "key 'one' has 2 open connections, of its max_connections=2" in refusal(response, 429)["message"]
        assert response.headers["connection"] == "close" and int(response.headers["retry-after"]) >= 1
        assert metric(server, 'api_key_connections{key="one"}') == 2
        assert metric(server, 'api_key_refusals_total{key="one",limit="max_connections"}') == 1
        ok(ask(clients[2], "2"))
        ok(ask(clients[0], "2"))  # which lets the first key have another
        ok(ask(clients[3], "1"))
        refusal(ask(clients[2], "1"), 429)  # counts for the second key, as before, until it is closed
        clients[1].close()
        ok(until_taken(lambda: ask(clients[2], "1")))
        stack.close()
        deadline = time.monotonic() + 60
        while any(metric(server, f'api_key_connections{{key="{name}"}}') for name in ("one", "two")):
            assert time.monotonic() < deadline, "connections that are gone count"
            time.sleep(0.05)


def test_a_connection_that_is_closed_counts_for_nobody(clock):
    """Also where its request is looked at late."""
    use, other = made(clock, max_connections=1), made(clock)
    shown = ShownKey()
    shown.show(use)
    shown.show(other)
    assert (use.num_connections, other.num_connections) == (0, 1)
    shown.close()
    shown.show(use)
    assert (use.num_connections, other.num_connections) == (0, 0)


def until_taken(ask) -> httpx.Response:
    """The first answer but 429: a request ends a little later than its client thinks."""
    deadline = time.monotonic() + 60
    while (response := ask()).status_code == 429:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.05)
    return response


def test_control_takes_a_key_that_may(shared_llm, shared, tmp_path):
    shared.wait_idle()
    path = write(tmp_path / "keys.yaml", {"name": "one", "key": "1"}, {"name": "boss", "key": "2", "may_control": True})
    with serving(shared_llm, options={"api_keys_file": path, "enable_control": True, "api_keys": ("0",)}) as server:
        said = refusal(server.client.post("/pause", headers=bearer("1")), 403)["message"]
        assert "key 'one' does not open /pause: that takes one with may_control" in said
        for key in ("2", "0"):
            assert ok(server.client.get("/is_paused", headers=bearer(key))) == {"is_paused": False}


@pytest.mark.slow
def test_open_paths_are_a_choice(shared_llm, shared):
    shared.wait_idle()
    for open_paths, opened, closed in (
        (HTTPOptions().open_paths, ("/", "/health", "/metrics"), ("/openapi.json", "/v1/models")),
        (("/health", "/openapi.json"), ("/health", "/openapi.json"), ("/", "/metrics", "/version", "/v1/models")),
    ):
        with serving(shared_llm, options={"api_keys": ("1",), "open_paths": open_paths}) as server:
            assert all(server.client.get(path).status_code == 200 for path in opened)
            assert all(server.client.get(path).status_code == 401 for path in closed)
            assert all(server.client.get(path, headers=bearer("1")).status_code == 200 for path in (*opened, *closed))
    with pytest.raises(ValueError, match="open_paths: '/v1/completions' can't be without a key, only /, /health"):
        ServerOptions(names=("a",), open_paths=("/v1/completions",))


def test_a_router_counts_no_tokens(tmp_path):
    path = write(tmp_path / "keys.yaml", {"name": "one", "key": "1", "tokens_per_minute": 5})
    with pytest.raises(
        ValueError, match="tokens_per_minute of one: a router counts no tokens; limit them in a file of its servers"
    ):
        make_router(RouterOptions(backends=("http://127.0.0.1:9",), api_keys_file=path))


@pytest.mark.slow
def test_sighup_reads_the_file_again(tmp_path):
    """Of a router, which has no model to load; nobody is up behind it. A wrong file at the start is an error in a line."""
    path = write(tmp_path / "keys.yaml", {"name": "one", "key": "1"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jaxserve.cli.router",
        "--backends=http://127.0.0.1:9",
        f"--port={port}",
        f"--api_keys_file={path}",
    ]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    try:

        def status(key: str) -> int:
            return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=bearer(key)).status_code

        def becomes(key: str, wanted: int) -> None:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None and time.monotonic() < deadline, "the router did not come, or did not read its keys"
                try:
                    if status(key) == wanted:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)

        becomes("1", 503)
        assert status("2") == 401
        write(tmp_path / "keys.yaml", {"name": "one", "key": "2"})
        process.send_signal(signal.SIGHUP)
        becomes("2", 503)
        assert status("1") == 401
        (tmp_path / "keys.yaml").write_text("[")
        process.send_signal(signal.SIGHUP)
        assert status("2") == 503
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert len(re.findall("the keys stay as they were", log)) == 1 and "Traceback" not in log
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "is not YAML" in done.stderr and "Traceback" not in done.stderr
