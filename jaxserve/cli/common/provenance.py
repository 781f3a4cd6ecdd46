"""What a result says of the run that made it, and how it is written: device, versions, revision, flags, JSON."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.common.engine_flags import engine_flags, engine_options


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, Any]:
    """What a result depends on besides the code: device, processor and library versions."""
    import flax
    import jax
    import jaxlib.version

    device = jax.local_devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "num_devices": len(jax.devices()),
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "flax": flax.__version__,
    }


_CODE = ("jaxserve", "kernels", "checkpoints", "scripts")  # not the results, which a run writes itself
_CHANGED = ("status", "--porcelain", "-uno", "--", *_CODE)


def _git(*command: str) -> str:
    """What git prints of this checkout. OSError or CalledProcessError outside of one."""
    git = ["git", "-C", str(Path(__file__).parents[3])]
    return subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout


def revision() -> str | None:
    """The checkout's commit, with "+" where the code differs from it; None outside a checkout."""
    try:
        commit, changed = _git("rev-parse", "--short=12", "HEAD"), _git(*_CHANGED)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")


def code_id() -> str:
    """What a result depends on of the code, by which one may be kept: git's ids of the trees of our packages, and a digest of what
    differs from them, if anything does. A commit of documents or results leaves it as it is. Outside a checkout: the version."""
    try:
        trees = _git("rev-parse", *(f"HEAD:{package}" for package in _CODE)).split()
        changes = _git("diff", "--no-ext-diff", "--binary", "HEAD", "--", *_CODE)
    except (OSError, subprocess.CalledProcessError):
        from jaxserve import __version__

        return f"version {__version__}"
    changed = f"+{hashlib.sha256(changes.encode()).hexdigest()[:12]}" if changes else ""
    return ".".join(tree[:10] for tree in trees) + changed


def _shown(value: Any) -> Any:
    """A flag's value; of a path into the checkout what lies below it, of one out of it the last part: where they lie is this
    machine's business."""
    if isinstance(value, list):
        return [_shown(v) for v in value]
    if not isinstance(value, str) or not value.startswith(("/", "../")):
        return value
    path, checkout = Path(value).resolve(), Path(__file__).parents[3].resolve()
    return str(path.relative_to(checkout)) if path.is_relative_to(checkout) else path.name


def provenance() -> dict[str, Any]:
    """What every result file carries: date, revision, versions, device, seed (None where there is no such option) and the flags
    given, but for a secret."""
    given = {name: flags.FLAGS[name].value for name in flags.FLAGS if flags.FLAGS[name].present and name != "api_key"}
    ours = {name: value for name, value in given.items() if isinstance(value, str | int | float | bool | list)}
    seed = engine_options()["seed"] if "seed" in engine_flags() else flags.FLAGS.seed if "seed" in flags.FLAGS else None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"date": now, "revision": revision(), **versions(), "seed": seed}
    return about | {"flags": {name: _shown(value) for name, value in ours.items()}}


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Writes a result to a file (folders are made), or to stdout for "-"; nothing for None."""
    if path is None:
        return
    text = json.dumps(result, indent=1)
    if path == "-":
        print(text)
    else:
        write_text(path, text + "\n")


def write_text(path: str | None, text: str) -> None:
    """Writes a table, say, to a file (folders are made); nothing for None."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
