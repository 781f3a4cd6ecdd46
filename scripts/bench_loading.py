"""How much memory a process takes at most while it loads a model, beside the bytes of the model's weights.

    python -m scripts.bench_loading --model=qwen3-0.6b --tensor_parallel_size=8 --json=FILE.json

Random weights of a model's shape are written as a Hugging Face folder. Then a fresh process loads it onto as many virtual devices
of this CPU, whose memory is the process's own. *Peak* is the most memory of its own that it had meanwhile (Linux's RssAnon, read
every few milliseconds), less what it had before, when JAX had started. Files are mapped: what is resident of them beside is the
system's page cache, which it takes back when it needs the memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.common.bench_models import RANDOM
from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_option
from jaxserve.cli.common.provenance import provenance, write_json

_MODEL = flags.DEFINE_enum("model", "qwen3-0.6b", sorted(RANDOM), "The shape of the model.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_DEVICES = define_option("tensor_parallel_size", 8)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

READ_SECONDS = 0.003  # between two looks at the memory


def write_folder(folder: Path, shape: dict[str, Any], dtype: str) -> int:
    """A Hugging Face folder with random weights of this config; their bytes."""
    import numpy as np
    from safetensors.numpy import save_file

    from jaxserve.models import hf_tensors, named_leaves
    from jaxserve.models.loading import random_model

    model = random_model(shape, dtype=dtype)
    tensors = {
        k: np.asarray(x) for path, leaf in named_leaves(model).items() for k, x in hf_tensors(model.config, path, leaf).items()
    }
    (folder / "config.json").write_text(json.dumps(shape | {"torch_dtype": dtype}))
    save_file(tensors, str(folder / "model.safetensors"))
    return sum(x.nbytes for x in tensors.values())


def load(folder: str, num_devices: int) -> dict[str, float]:
    """Of a process of its own: loads as an engine does. Peak and held bytes beyond those before, those mapped, and seconds."""
    import jax

    from jaxserve.config import EngineConfig
    from jaxserve.engine.runner_setup import prepare
    from jaxserve.models.files import find_model
    from jaxserve.models.loading import load_files

    jax.block_until_ready(jax.device_put(0, jax.devices()[-1]))
    files = find_model(folder)
    shards, config, _ = prepare(files, EngineConfig(tensor_parallel_size=num_devices), None, None)
    before, start = memory("RssAnon"), time.perf_counter()
    peak, is_over = [before], threading.Event()

    def watch() -> None:
        while not is_over.wait(READ_SECONDS):
            peak[0] = max(peak[0], memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = load_files(files, skip_tokenizer_init=True, dtype=config.dtype, transposed=None, shards=shards)
    jax.block_until_ready(jax.tree.leaves(loaded.module if shards is None else loaded.module.weights))
    seconds, held = time.perf_counter() - start, memory("RssAnon")
    is_over.set()
    watcher.join()
    found = {"peak_bytes": max(peak[0], held) - before, "held_bytes": held - before, "mapped_bytes": memory("RssFile")}
    return found | {"seconds": seconds}


def memory(name: str) -> int:
    """Bytes of this process, as /proc says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory(prefix="bench_loading_") as folder:
        num_bytes = write_folder(Path(folder), RANDOM[_MODEL.value], _DTYPE.value)
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES.value}"
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(load, folder, _DEVICES.value).result()
    found |= {"weights_bytes": num_bytes, "peak_ratio": found["peak_bytes"] / num_bytes}
    print(
        f"{_MODEL.value}, {num_bytes / 2**20:.0f} MiB in {_DTYPE.value}, on {_DEVICES.value} devices: peak "
        f"{found['peak_bytes'] / 2**20:.0f} MiB, {found['peak_ratio']:.2f} times, in {found['seconds']:.1f} s; "
        f"of files and libraries {found['mapped_bytes'] / 2**20:.0f} MiB are mapped"
    )
    how = {"model": _MODEL.value, "dtype": _DTYPE.value, "tensor_parallel_size": _DEVICES.value}
    write_json(_JSON.value, {"benchmark": "loading", **how, **found, **provenance()})


if __name__ == "__main__":
    run_command(main)
