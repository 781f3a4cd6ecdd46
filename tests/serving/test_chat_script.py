"""scripts.chat, with a model in its process and with a server, spoken to through a pipe."""

import os
import subprocess
import sys
from pathlib import Path

from tests.serving.http_server import serving

ROOT = Path(__file__).parents[2]
LIMITS = ("--max_num_seqs=2", "--max_num_batched_tokens=16", "--num_pages=64", "--page_size=8")


def chat(said: str, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.chat", "--temperature=0", "--max_tokens=4", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, input=said, capture_output=True, text=True, timeout=120)


def test_in_process(folder, tmp_path):
    done = chat("a\n\n/new\nx\n/quit\nnever\n", tmp_path, f"--model={folder}", *LIMITS)
    assert done.returncode == 0 and done.stdout == "BCDE\nBCDE\n", done.stderr


def test_with_a_server(shared_llm, tmp_path):
    with serving(shared_llm, options={"api_keys": ("k",)}) as server:
        done = chat("a\n", tmp_path, f"--url={server.url}", "--api_key=k", "--system=s")
        assert done.returncode == 0 and done.stdout == "BCDE\n", done.stderr
        done = chat("a" * 400 + "\na\n", tmp_path, f"--url={server.url}/v1", "--api_key=k")
        assert done.stdout == "BCDE\n" and "max_model_len" in done.stderr, "a message that is too long is taken back"
        done = chat("a\n", tmp_path, f"--url={server.url}")
        assert done.returncode == 1 and "no valid API key" in done.stderr
