"""Replicas without Ray: what may be chosen, how arguments of `serve run` are read, and how many replicas a load asks for."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxserve.cli.common.fleet import last_error, told_by
from jaxserve.ray.fleet import TARGET_LOAD, FleetOptions, fleet_options, replica_load, replicas_wanted
from jaxserve.ray.resources import host_resources, num_devices
from jaxserve.serving.options import ServerOptions

SERVER = ServerOptions(names=("a",))
DRAFTS = {"method": "draft_model", "model": "d", "num_speculative_tokens": 2}


def test_arguments_of_serve_run():
    """Text as a command line gives it, and values as a config file does."""
    for args in (
        {"model": "a/b", "replicas": "2", "max_replicas": "4", "max_num_seqs": "8", "dtype": "float32", "grace": "5"},
        {"model": "a/b", "replicas": 2, "max_replicas": 4, "max_num_seqs": 8, "dtype": "float32", "grace": 5},
    ):
        found = fleet_options(args)
        assert (found.model, found.replicas, found.max_replicas, found.grace) == ("a/b", 2, 4, 5)
        assert found.engine == {"max_num_seqs": 8, "dtype": "float32"} and found.server.names == ("a/b",)
    found = fleet_options({"model": "1234", "served_model_name": "x,y", "api_key": "77", "enable_control": "true"})
    assert found.model == "1234" and found.server.names == ("x", "y")
    assert found.server.api_keys == ("77",) and found.server.enable_control
    assert num_devices(fleet_options({"model": "m", "tensor_parallel_size": 2, "pipeline_parallel_size": "2"}).engine) == 4


def test_arguments_of_serve_run_are_those_of_the_server_too(monkeypatch, tmp_path):
    (tmp_path / "template").write_text("{{ messages }}", encoding="utf-8")
    given = {
        "model": "m",
        "tool_call_parser": "none",
        "max_body_bytes": "1000000",
        "sse_keep_alive_interval": 15,
        "open_paths": "/health,/ping",
        "middleware": ["a.b", "c.d"],
        "default_chat_template_kwargs": '{"enable_thinking": false}',
        "chat_template": str(tmp_path / "template"),
        "skip_tokenizer_init": "false",
        "override_generation_config": {"top_k": 3},
        "api_key": ["one", "two"],
        "max_num_seqs": 8,
    }
    monkeypatch.setenv("JAXSERVE_API_KEY", "three")
    found = fleet_options(given)
    server = found.server
    assert (server.tool_call_parser, server.max_body_bytes, server.sse_keep_alive_interval) == ("none", 1_000_000, 15.0)
    assert (server.open_paths, server.middleware, server.root) == (("/health", "/ping"), ("a.b", "c.d"), "m")
    assert server.default_chat_template_kwargs == {"enable_thinking": False} and server.api_keys == ("one", "two", "three")
    assert (found.chat_template, found.skip_tokenizer_init) == ("{{ messages }}", False)
    assert found.override_generation_config == {"top_k": 3} and found.engine == {"max_num_seqs": 8}
    assert fleet_options({"model": "m", "enable_control": "1", "replicas": 2}).server.api_keys == ("three",)


def test_what_a_replica_takes():
    pair = {"tensor_parallel_size": 2}
    assert host_resources({"CPU": 4.0}, pair, 4, None) == {"num_cpus": 1, "num_gpus": 0}
    assert host_resources({"CPU": 8.0, "GPU": 4.0}, pair, 2, None) == {"num_cpus": 1, "num_gpus": 2}
    assert host_resources({}, pair, 2, 2) == {"num_cpus": 1, "num_gpus": 2}, "it grows on demand"
    assert host_resources(None, pair, 2, None) == {"num_cpus": 1, "num_gpus": 2}, "before Ray is started"
    assert host_resources(None, pair, 2, 0) == {"num_cpus": 1, "num_gpus": 0}
    with pytest.raises(ValueError, match="3 replicas of 2 GPU each need 6, and Ray's cluster has 4"):
        host_resources({"CPU": 8.0, "GPU": 4.0}, pair, 3, None)
    four = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert host_resources({"CPU": 8.0, "GPU": 8.0}, four, 2, None, 2) == {"num_cpus": 1, "num_gpus": 2}
    assert host_resources({"CPU": 4.0}, four, 1, None, 4) == {"num_cpus": 1, "num_gpus": 0}
    with pytest.raises(ValueError, match="2 replicas of 2 CPU each need 4, and Ray's cluster has 3"):
        host_resources({"CPU": 3.0}, four, 2, None, 2)
    with pytest.raises(ValueError, match="hosts_per_replica=2 must divide the 3 GPUs"):
        host_resources({"CPU": 8.0, "GPU": 8.0}, four, 1, 3, 2)
    with pytest.raises(ValueError, match="5 replicas of 1 CPU each need 5, and Ray's cluster has 4"):
        host_resources({"CPU": 4.0}, {}, 5, None)


@pytest.mark.parametrize(
    "args,why",
    [
        ({}, "give model=MODEL"),
        ({"model": "m", "replica": "2"}, "replica"),
        ({"model": "m", "replicas": "0"}, "replicas=0 must be at least 1"),
        ({"model": "m", "replicas": 3, "max_replicas": 2}, "max_replicas=2"),
        ({"model": "m", "gpus_per_replica": -1}, "gpus_per_replica=-1"),
        ({"model": "m", "grace": -1}, "grace=-1"),
        ({"model": "m", "hosts_per_replica": 0}, "hosts_per_replica=0 must be at least 1"),
        ({"model": "m", "hosts_per_replica": 2}, "hosts_per_replica=2 must divide the 1 devices of a replica"),
        ({"model": "m", "max_num_seqs": "many"}, "max_num_seqs='many'"),
        ({"model": "m", "enable_control": True}, "give api_keys too"),
        ({"model": "m", "grace": "soon"}, "grace='soon': Expected `float`"),
        ({"model": "m", "enable_log_requests": "perhaps"}, "enable_log_requests='perhaps': Expected `bool`"),
        ({"model": "m", "max_connections": 5}, "unknown option max_connections"),
        ({"model": "m", "otlp_endpoint": "here"}, "otlp_endpoint='here' must be a URL"),
        ({"model": "m", "chat_template": "/nowhere"}, "chat_template='/nowhere' is neither Jinja source nor a file"),
        ({"model": "m", "generation_config": "theirs"}, "generation_config='theirs' must be one of auto, vllm"),
        ({"model": "m", "override_generation_config": {"n": 2}}, "override_generation_config: n is not taken"),
        ({"model": "m", "override_generation_config": {"top_k": -9}}, "top_k=-9"),
        ({"model": "m", "chat_template": "{{ 1 }}", "skip_tokenizer_init": True}, "chat_template needs a tokenizer"),
        ({"model": "m", "request_timeout": 0}, "request_timeout=0"),
        ({"model": "m", "max_replicas": 2, "api_key": "a", "enable_control": True}, "enable_control: not with max_replicas=2"),
        ({"model": "m", "max_replicas": 2, "response_store": "/tmp/a"}, "response_store: not with .* or give replicas=1"),
    ],
)
def test_arguments_that_are_wrong_are_named(args, why):
    with pytest.raises((ValueError, TypeError), match=why):
        fleet_options(args)


def test_a_role_is_refused():
    with pytest.raises(NotImplementedError, match="role='prefill'"):
        FleetOptions(model="m", server=ServerOptions(names=("a",), role="prefill"))


@pytest.mark.parametrize(
    "args,why",
    [
        ({"attention_groups": 2, "tensor_parallel_size": 2, "hosts_per_replica": 2}, "attention_groups=2 is .* there are 2 hosts"),
        ({"attention_groups": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "pipeline_parallel_size=2 can't be had"),
        ({"speculative_config": DRAFTS, "tensor_parallel_size": 2}, "method='draft_model' runs on one device"),
        ({"speculative_config": DRAFTS, "pipeline_parallel_size": 2}, "drafts are not verified over stages"),
    ],
)
def test_layouts_that_engines_refuse_are_refused_before_ray_starts_any(args, why):
    with pytest.raises(NotImplementedError, match=why):
        fleet_options({"model": "m"} | args)
    fleet_options({"model": "m", "attention_groups": 2, "tensor_parallel_size": 2})
    fleet_options({"model": "m", "speculative_config": DRAFTS})


def test_the_load_of_a_replica():
    assert replica_load(0, 0, 8, 0.0) == 0
    assert replica_load(4, 0, 8, 0.25) == 0.5 and replica_load(2, 0, 8, 0.75) == 0.75, "rows or pages, whichever are short"
    assert replica_load(8, 8, 8, 1.0) == 2.0, "as many wait as run"


def test_replicas_follow_the_load():
    assert replicas_wanted([0.0, 0.0, 0.0]) == 1, "never none"
    for n in range(1, 9):
        assert replicas_wanted([TARGET_LOAD] * n) == n, "at the target nothing changes"
        assert replicas_wanted([TARGET_LOAD * 1.1] * n) == n + 1 and replicas_wanted([1.0, *[0.0] * (n - 1)]) == 2
    assert replicas_wanted([3.0]) == 5 and replicas_wanted([0.2, 0.1, 0.3]) == 1


def test_the_last_error_of_a_replica_is_told():
    """As Ray Serve 2.60 tells of a constructor that raises."""
    text = """Deploying application jaxserve failed: Failed to update the deployments [Deployment(name='jaxserve', app='jaxserve')].
The deployment failed to start 6 times in a row. This may be due to a problem with its constructor or a health check. Error:
\x1b[36mray::ServeReplica:jaxserve:jaxserve.initialize_and_get_metadata()\x1b[39m (pid=7, ip=127.0.0.1, actor_id=1, repr=<Replica>)
  File "/usr/lib/python3.12/concurrent/futures/_base.py", line 456, in result
    return self.__get_result()
RuntimeError: Traceback (most recent call last):
  File "/ray/serve/_private/replica.py", line 1404, in initialize
    await self._user_callable_initialized_event.wait()
  File "/jaxserve/ray/application.py", line 42, in __init__
ValueError: num_pages=3 must be at least 4 for max_model_len=64: raise it
"""
    assert last_error(text) == "ValueError: num_pages=3 must be at least 4 for max_model_len=64: raise it"
    assert last_error("the controller is gone\n\n") == "the controller is gone"
    assert last_error("FileNotFoundError: a\nsome.module.OtherError: b: c\nand more\n") == "some.module.OtherError: b: c"


def test_flags_that_do_not_go_together_are_named():
    for flags, why in (
        (["--replicas=2"], "--replicas: give --ray too"),
        (["--ray", "--role=decode"], "--role: Ray places the processes of a replica, which has no role"),
        (["--ray", "--num_hosts=2", "--host_id=0"], "--num_hosts, --host_id: Ray places"),
    ):
        command = [sys.executable, "-m", "jaxserve", "serve", "nothing", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1


def test_what_ray_says_of_an_application_that_does_not_start():
    def gone():
        raise ConnectionError("no controller")

    def of(*messages):
        deployments = {str(i): SimpleNamespace(message=message) for i, message in enumerate(messages)}
        return lambda: SimpleNamespace(applications={"jaxserve": SimpleNamespace(deployments=deployments)})

    assert told_by(gone, "said") == "said" == told_by(of("slow"), "said")
    assert told_by(of("slow", "ValueError: x"), "said") == "ValueError: x"
    assert told_by(lambda: SimpleNamespace(applications={}), "said") == "said"
