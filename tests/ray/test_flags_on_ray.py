"""Every flag of `jaxserve serve` is heard by a fleet on Ray, or refused there. Needs no Ray."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each flag comes to with another value than its default, where that needs others beside them: taken, refused or dropped.
CODE = """
import json, sys
from absl import app, flags
import jaxserve.cli.serve as serve
from jaxserve.cli.common import command, fleet, http_server

FLAGS = flags.FLAGS
values = json.loads(sys.argv[1])


def outcome(*given):
    for name in FLAGS:
        FLAGS[name].unparse()
    try:
        command.parse(["jaxserve serve", "m", "--ray", *given])
        fleet.on_ray()
        return repr((serve.fleet(), http_server.http_options()))
    except (flags.Error, app.UsageError) as error:
        return error


def another(flag):
    if flag.name in values:
        return values[flag.name]
    choices = getattr(flag, "enum_values", None) or getattr(flag.parser, "enum_values", None)
    if flag.boolean:
        return [f"--{'no' if flag.default else ''}{flag.name}"]
    if choices:
        return [f"--{flag.name}={next(choice for choice in choices if choice != flag.default)}"]
    return [f"--{flag.name}={(flag.default or 0) + 2 if flag.flag_type() in ('int', 'float') else 'x'}"]


found = {"taken": [], "refused": {}, "dropped": []}
ours = [flag for module, some in FLAGS.flags_by_module_dict().items() if module.startswith("jaxserve") for flag in some]
for flag in ours:
    if flag.name not in ("ray", "model"):
        *others, own = another(flag)
        without, came_to = outcome(*others), outcome(*others, own)
        assert isinstance(without, str), without
        if isinstance(came_to, str):
            found["dropped" if came_to == without else "taken"].append(flag.name)
        else:
            found["refused"][flag.name] = str(came_to)
print(json.dumps(found))
"""
PROXYS = "Ray's proxy has no such option"
PLACED = "Ray places the processes of a replica"
REFUSED = {  # flags that are refused -> why
    **dict.fromkeys(("uds", "ssl_ca_certs", "ssl_ciphers", "max_connections", "max_header_bytes"), PROXYS),
    "ssl_cert_reqs": "needs --ssl_certfile",  # and --ssl_ca_certs
    **dict.fromkeys(("num_hosts", "host_id", "coordinator", "cluster", "join_seconds", "role"), PLACED),
    "api_server_count": "on Ray give --replicas",
    "api_keys_file": "each replica would count requests and tokens for itself",
    **dict.fromkeys(("tbt_slo_ms", "step_times"), "go together"),  # as without Ray
}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl (Debian's package of that name)")
def test_no_flag_of_a_server_is_dropped_on_ray(tmp_path):
    certificate, key = tmp_path / "own.crt", tmp_path / "own.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=a"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    (tmp_path / "both.pem").write_bytes(key.read_bytes() + certificate.read_bytes())
    (tmp_path / "keys.json").write_text('[{"name": "a", "key": "b"}]')
    (tmp_path / "template").write_text("{{ messages }}")
    (tmp_path / "config.json").write_text('{"max_num_seqs": 3}')
    two, pages = "--tensor_parallel_size=2", '--allowed_origins=["https://a.example"]'
    values = {
        "api_keys_file": [f"--api_keys_file={tmp_path / 'keys.json'}"],
        "open_paths": ["--open_paths=/health"],
        "ssl_certfile": [f"--ssl_certfile={tmp_path / 'both.pem'}"],
        "ssl_keyfile": [f"--ssl_certfile={tmp_path / 'both.pem'}", f"--ssl_keyfile={key}"],
        "ssl_cert_reqs": ["--ssl_cert_reqs=2"],
        "ssl_ca_certs": [f"--ssl_certfile={tmp_path / 'both.pem'}", f"--ssl_ca_certs={certificate}"],
        "chat_template": [f"--chat_template={tmp_path / 'template'}"],
        "default_chat_template_kwargs": ['--default_chat_template_kwargs={"a": 1}'],
        "override_generation_config": ['--override_generation_config={"top_k": 3}'],
        "otlp_endpoint": ["--otlp_endpoint=http://127.0.0.1:4318"],
        "root_path": ["--root_path=/a"],
        "allowed_origins": [pages],
        "allowed_methods": [pages, '--allowed_methods=["GET"]'],
        "allowed_headers": [pages, '--allowed_headers=["a"]'],
        "allow_credentials": [pages, "--allow_credentials"],
        "enable_control": ["--api_key=a", "--enable_control"],
        "config": [f"--config={tmp_path / 'config.json'}"],
        "hosts_per_replica": [two, "--hosts_per_replica=2"],
        "attention_groups": [two, "--attention_groups=2"],
        "graph_collectives": [two, "--graph_collectives"],
        "all_reduce_backend": [two, "--all_reduce_backend=xla"],
        "kv_store": ["--kv_store=host:64MiB"],
        "kv_store_write_policy": ["--kv_store=host:64MiB", "--kv_store_write_policy=write_through"],
        "bucket_plan": [f"--bucket_plan={ROOT / 'benchmarks' / 'buckets' / 'plan_azure_0.9.json'}"],
        "gpu_memory_utilization": ["--gpu_memory_utilization=0.5"],
        "ssl_ciphers": [f"--ssl_certfile={tmp_path / 'both.pem'}", "--ssl_ciphers=HIGH"],
        "speculative_config": ['--speculative_config={"method": "ngram", "num_speculative_tokens": 2}'],
    }
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(values)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["dropped"] == []
    assert set(found["refused"]) == set(REFUSED) and not [
        name for name, why in REFUSED.items() if why not in found["refused"][name]
    ]
    assert len(found["taken"]) > 60
