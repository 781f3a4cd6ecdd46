"""A pytest plugin for vLLM's own tests: what they start as `vllm serve` is `jaxserve serve`, of a model that lies here.

It is loaded in the Python that has vLLM, by name (`-p plugin`), and knows nothing of jaxserve but its command. It replaces the part
of vLLM's RemoteOpenAIServer that starts the process, and gives every name of a model on the hub the tokenizer of the model that
answers for it. JAXSERVE_COMMAND is the command, JAXSERVE_PATH the folder of its package; JAXSERVE_MODELS a folder with the models
plain, plain_bos, call, calls, greets and weather.
"""
# pyright: reportMissingImports=false

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(os.environ["JAXSERVE_MODELS"])
KEY = "token-abc123"  # the one that RemoteOpenAIServer's clients send
# Flags that a device, another model or an adapter needs, or that we have no use for, and how many values each has (None: all).
DROPPED = {
    "--enable-lora": 0,
    "--lora-modules": None,
    "--max-lora-rank": 1,
    "--max-cpu-loras": 1,
    "--gpu-memory-utilization": 1,
    "--seed": 1,
    "--hf-overrides": 1,
    "--trust-remote-code": 0,
    "--load-format": 1,
    "--tokenizer": 1,
    "--attention-backend": 1,
    "--max-num-seqs": 1,
    "--max-logprobs": 1,
    "--enable-scale-out": 0,
    "--tokens-only": 0,
    "--reasoning-config": 1,
    "--enable-sleep-mode": 0,
    "--show-hidden-metrics-for-version": 1,
    "--runner": 1,
    "--enforce-eager": 0,
}
# Which tests' server has which model.
SCRIPTS = {
    "weather": "test_return_token_ids.py",
    "calls": "responses/test_function_call.py",
    "greets": "anthropic/test_messages.py",
}
SMALL = ["--warm_up=first_use", "--max_num_seqs=16"]  # steps compile when they are needed, few of them
# In a test's name: adapters, marks in outputs, images; and a test that starts vLLM itself.
MISSING = ("lora", "watermarked", "multimodal", "run_batch")
SERVED = ("server", "client", "server_fixture", "force_include_usage", "auto_config")  # how the names of servers' fixtures end
CONTROL = ("sleep", "wake_up", "is_sleeping", "pause", "resume", "is_paused", "server_info", "reset_prefix_cache")


class Now:
    """The test that runs, and the model of the last server."""

    test: str = ""
    model: str = str(MODELS / "plain")


def chosen(model: str, args: list[str]) -> str:
    """The model that answers: one that thinks and calls where the server is told to parse that; else one whose prompts begin with
    a special token unless Qwen's do not."""
    if not {"--reasoning-parser", "--enable-auto-tool-choice"} & set(args):
        return str(MODELS / ("plain" if "qwen" in model.lower() else "plain_bos"))
    for name, tests in SCRIPTS.items():
        if tests in Now.test:
            return str(MODELS / name)
    return str(MODELS / "call")


def kept(args: list[str]) -> list[str]:
    """The flags without those of DROPPED."""
    rest, out = list(args), []
    while rest:
        given = rest.pop(0)
        name, _, value = given.partition("=")
        if name in DROPPED:
            if value:
                continue
            number = DROPPED[name]
            ends = [i for i, value in enumerate(rest) if value.startswith("--")] or [len(rest)]
            del rest[: ends[0] if number is None else number]
        else:
            out.append(given)
    return out


def start(self, model: str, args: list[str], env_dict: dict[str, str] | None) -> None:
    """Stands in for RemoteOpenAIServer._start_server."""
    Now.model = chosen(model, args)
    flags = kept([str(arg) for arg in args])
    flags += [*SMALL, "--vllm_metric_names"]
    if "--served-model-name" not in flags:
        flags += ["--served-model-name", model]
    if (env_dict or {}).get("VLLM_SERVER_DEV_MODE") == "1":  # our control routes need a key
        flags += ["--enable_control", "--api_key", KEY]
    env = os.environ | (env_dict or {}) | {"PYTHONPATH": os.environ["JAXSERVE_PATH"]}
    if "VLLM_API_KEY" in env:
        env["JAXSERVE_API_KEY"] = env["VLLM_API_KEY"]
    command = [*os.environ["JAXSERVE_COMMAND"].split(), "serve", model if os.path.exists(model) else Now.model, *flags]
    print(*command, flush=True)
    self.proc = subprocess.Popen(command, env=env, stdout=sys.stdout, stderr=sys.stderr, start_new_session=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    Now.test = item.nodeid


def asks_a_server(item) -> bool:
    """Whether the test starts one, itself or by a fixture: the others are of vLLM's own objects."""
    names = [name for name in item.fixturenames if name.endswith(SERVED)]
    return bool(names) or "RemoteOpenAIServer" in inspect.getsource(item.function)


def pytest_collection_modifyitems(config, items) -> None:
    """Leaves out the cases of what we don't have, and those that ask no server."""
    left_out = [item for item in items if any(name in item.nodeid.lower() for name in MISSING) or not asks_a_server(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure() -> None:
    import requests
    import transformers
    import vllm.config
    import vllm.tokenizers
    from vllm.transformers_utils import repo_utils

    utils = importlib.import_module("tests.utils")  # vLLM's

    def local(name):
        return name if os.path.exists(str(name)) else Now.model

    for kind in (transformers.AutoTokenizer, transformers.AutoConfig):
        load = kind.from_pretrained.__func__
        local_load = classmethod(lambda cls, name, *args, load=load, **kwargs: load(cls, local(name), *args, **kwargs))
        kind.from_pretrained = local_load  # pyright: ignore[reportAttributeAccessIssue]
    get_tokenizer, request = vllm.tokenizers.get_tokenizer, requests.Session.request
    vllm.tokenizers.get_tokenizer = lambda tokenizer_name, *args, **kwargs: get_tokenizer(local(tokenizer_name), *args, **kwargs)
    config = vllm.config.ModelConfig
    vllm.config.ModelConfig = lambda model, **kwargs: config(model=local(model), **kwargs)
    hub = type("Hub", (), {"snapshot_download": lambda *_, **__: str(MODELS / "plain")})()
    repo_utils.hf_api = lambda: hub

    def with_key(session, method, url, **given):
        if str(url).partition("?")[0].rpartition("/")[2] in CONTROL:
            given["headers"] = {"Authorization": f"Bearer {KEY}"} | (given.get("headers") or {})
        return request(session, method, url, **given)

    requests.Session.request = with_key  # pyright: ignore[reportAttributeAccessIssue]
    wait = utils.RemoteVLLMServer._wait_for_server
    utils.RemoteVLLMServer._wait_for_server = lambda self, *, url, timeout: wait(self, url=url, timeout=4 * timeout)  # no GPU
    utils.RemoteOpenAIServer._start_server = start
    utils.RemoteVLLMServer._pre_download_model = lambda *_: None
    utils.RemoteVLLMServer._wait_for_gpu_memory_release = lambda *_, **__: None
