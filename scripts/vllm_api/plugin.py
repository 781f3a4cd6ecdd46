"""A pytest plugin for vLLM's own tests: what they start as `vllm serve` is `jaxserve serve`, of a model that lies here.

It is loaded in the Python that has vLLM, by name (`-p plugin`), and knows nothing of jaxserve but its command. It changes the
commands of processes that are vLLM's server or its batch runner, and gives every name of a model on the hub the tokenizer of the
model that answers for it. JAXSERVE_COMMAND is the command, JAXSERVE_PATH the folder of its package; JAXSERVE_MODELS a folder with
the models plain, plain_bos, and those of SCRIPTS and "call".
"""
# pyright: reportMissingImports=false

import importlib
import inspect
import os
import subprocess
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
    "--reasoning-config": 1,
    "--enable-sleep-mode": 0,
    "--show-hidden-metrics-for-version": 1,
    "--runner": 1,
    "--enforce-eager": 0,
}
OURS = {"--tokens-only": "--skip-tokenizer-init"}  # as vLLM's flag does without a tokenizer
# Which tests' server has which model.
SCRIPTS = {
    "weather": "test_return_token_ids.py",
    "calls": "responses/test_function_call.py",
    "counts": "responses/test_basic.py",
    "extracts": "responses/test_structured_output.py",
    "remembers": "responses/test_stateful.py",
    "greets": "anthropic/test_messages.py",
}
SMALL = ["--warm_up=first_use", "--max_num_seqs=16"]  # steps compile when they are needed, few of them
# In a test's name: adapters, marks in outputs, images; and a test that starts vLLM itself.
MISSING = ("lora", "watermarked", "multimodal", "test_embeddings", "test_score", "transcription", "translation")
# How the names of servers' fixtures end.
SERVED = ("server", "client", "server_url", "server_fixture", "force_include_usage", "auto_config")


class Now:
    """The test that runs; the model of the last server, and whether that has control routes, for which it has a key."""

    test: str = ""
    model: str = str(MODELS / "plain")
    has_key: bool = False


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
            out.append(OURS.get(given, given))
    return out


def vllm_words(args) -> list[str]:
    """What a command of vLLM's server or batch runner says behind its name, "serve" or "run-batch" first; [] of any other."""
    words = [str(arg) for arg in args] if isinstance(args, list | tuple) else []
    if words[1:2] == ["-m"] and "api_server" in words[2]:
        words = ["vllm", "serve", *words[3:]]
    return words[1:] if words[:1] == ["vllm"] and words[1:2] in (["serve"], ["run-batch"]) else []


def our_command(name: str, args: list[str], env: dict[str, str]) -> list[str]:
    """Our command in place of vLLM's."""
    if "--model" in args:
        at = args.index("--model")
        model, args = args[at + 1], args[:at] + args[at + 2 :]
    else:
        model, args = args[0], args[1:]
    Now.model = model if os.path.exists(model) else chosen(model, args)
    flags = [*kept(args), *SMALL]
    if "--served-model-name" not in flags:
        flags += ["--served-model-name", model]
    if name == "serve":
        flags += ["--vllm_metric_names"]
        Now.has_key = env.get("VLLM_SERVER_DEV_MODE") == "1"
        if Now.has_key:  # our control routes need one
            flags += ["--enable_control", "--api_key", KEY]
    return [*os.environ["JAXSERVE_COMMAND"].split(), name, Now.model, *flags]


class Process(subprocess.Popen):
    """Of ours where a test asks for vLLM."""

    def __init__(self, args, *rest, **given):
        if words := vllm_words(args):
            env = dict(given.get("env") or os.environ) | {"PYTHONPATH": os.environ["JAXSERVE_PATH"]}
            if "VLLM_API_KEY" in env:
                env["JAXSERVE_API_KEY"] = env["VLLM_API_KEY"]
            args, given["env"] = our_command(words[0], words[1:], env), env
            print(*args, flush=True)
        super().__init__(args, *rest, **given)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    Now.test = item.nodeid


def asks_a_server(item) -> bool:
    """Whether the test starts one, itself or by a fixture: the others are of vLLM's own objects."""
    names = [name for name in item.fixturenames if name.endswith(SERVED)]
    source = inspect.getsource(item.function)
    return bool(names) or "RemoteOpenAIServer" in source or "subprocess.Popen(" in source


def pytest_collection_modifyitems(config, items) -> None:
    """Leaves out the cases of what we don't have, and those that ask no server."""
    left_out = [item for item in items if any(name in item.nodeid.lower() for name in MISSING) or not asks_a_server(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure() -> None:
    import requests
    import transformers
    import vllm.config
    import vllm.model_executor.model_loader.weight_utils as weight_utils
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
    weight_utils.download_weights_from_hf = lambda *_, **__: str(MODELS / "plain")

    def with_key(session, method, url, **given):
        if Now.has_key:
            given["headers"] = {"Authorization": f"Bearer {KEY}"} | (given.get("headers") or {})
        return request(session, method, url, **given)

    requests.Session.request = with_key  # pyright: ignore[reportAttributeAccessIssue]
    wait = utils.RemoteVLLMServer._wait_for_server
    utils.RemoteVLLMServer._wait_for_server = lambda self, *, url, timeout: wait(self, url=url, timeout=4 * timeout)  # no GPU
    subprocess.Popen = Process  # pyright: ignore[reportAttributeAccessIssue]
    utils.RemoteVLLMServer._pre_download_model = lambda *_: None
    utils.RemoteVLLMServer._wait_for_gpu_memory_release = lambda *_, **__: None
