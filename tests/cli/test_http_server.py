"""The flags that serve and router share: TLS works, and what can't work is said before anything is loaded."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import MODULES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl (Debian's package of that name)")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1, its key, and another's key."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("own", "other"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        outputs = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subprocess.run([*command, *names, *outputs], check=True, capture_output=True, timeout=60)
    return folder


def start(module: str, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_https(files):
    """A router without servers says so, to who trusts its certificate; plain http is no way in."""
    import ssl

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tls = (f"--ssl_certfile={files / 'own.crt'}", f"--ssl_keyfile={files / 'own.key'}")
    process = start("jaxserve.cli.router", "--backends=http://127.0.0.1:9", f"--port={port}", *tls)
    try:
        with httpx.Client(verify=ssl.create_default_context(cafile=str(files / "own.crt"))) as client:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None and time.monotonic() < deadline, "the router did not start"
                try:
                    health = client.get(f"https://127.0.0.1:{port}/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
        assert health.status_code == 503 and "error" in health.json()
        with pytest.raises(httpx.ConnectError, match="(?i)certificate verify failed"):
            httpx.get(f"https://127.0.0.1:{port}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    "module, certificate, key, said",
    [
        ("serve", None, "own.key", "needs --ssl_certfile"),
        ("serve", "own.crt", "nothing.key", "No such file"),
        ("router", "nothing.crt", "own.key", "No such file"),
        ("router", "own.crt", "other.key", "KEY_VALUES_MISMATCH"),
    ],
)
def test_no_tls_is_said_at_once(files, module, certificate, key, said):
    """Before the model, which is not there, is looked for."""
    given = [f"--ssl_{kind}={files / name}" for kind, name in (("certfile", certificate), ("keyfile", key)) if name]
    target = "--model=/nothing/there" if module == "serve" else "--backends=http://127.0.0.1:9"
    process = start(MODULES[module], target, *given)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and said in output and "Traceback" not in output and "/nothing/there" not in output


@pytest.mark.parametrize("flag", ["--ssl_cert_reqs=2", "--ssl_ciphers=HIGH"])
def test_what_only_tls_has_needs_a_certificate(flag):
    """Who asks for clients' certificates is not to have an open server."""
    process = start(MODULES["router"], "--backends=http://127.0.0.1:9", flag)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"{flag} needs --ssl_certfile" in output and "Traceback" not in output
