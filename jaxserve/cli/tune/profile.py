"""Times steps of every kind on this machine and fits a step-time model, which `jaxserve tune buckets` and `tune budget` plan with.

    jaxserve tune profile --model=tiny-qwen3 --max_num_batched_tokens=4096 --max_model_len=8448 --output=steps.json
    jaxserve tune profile --points=steps.json --output=steps.json

Buckets of a grid are compiled and run with short, middling and long KV, several rounds of visits each; where a bucket half-way
between two others is not what lies between them, it is measured as well. The model is then tried on steps it never saw. With
--points nothing is measured: the points that an earlier profile keeps are fitted by the code as it is now. What stands beside a
profile (date, revision, device, flags) is of its measurement; when, and by which revision, it was fitted stands under "fitted".
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from typing import Any

from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import (
    define_engine_flags,
    engine_flags,
    engine_options,
    refuse_flags,
    refuse_options,
)
from jaxserve.cli.common.provenance import provenance

_OUTPUT = flags.DEFINE_string("output", "steps.json", "Where the model is written.")
_POINTS = flags.DEFINE_string("points", None, "Measure nothing: fit the points of this earlier profile anew.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Visits of each point; noisy points get as many again.", lower_bound=1)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.1, "Error of interpolation above which a bucket between two is kept.")
_MAX_BUCKETS = flags.DEFINE_integer("max_buckets", 48, "Most buckets to measure.", lower_bound=4)
_HELD_OUT = flags.DEFINE_integer("held_out", 24, "Random steps that the model is tried on.", lower_bound=1)
_MULTIPLE = flags.DEFINE_integer("multiple", None, "Sizes are multiples of it; by default 8 on a GPU, 2 on a CPU.", lower_bound=1)
_MIN_SECONDS = flags.DEFINE_float("min_seconds", 0.1, "Least time of a visit.")
_OF_MEASURING = ("rounds", "tolerance", "max_buckets", "held_out", "multiple", "min_seconds")
define_engine_flags(model="tiny-qwen3")


def measured() -> Any:
    """A StepTimeModel of this machine."""
    import jax

    from jaxserve.config import engine_config
    from jaxserve.engine.measure import StepMeasurer
    from jaxserve.engine.resolution import model_shape
    from jaxserve.step_times.fitted import DEVICES

    logging.getLogger("jaxserve").setLevel(logging.WARNING)  # or it names every program
    start = time.perf_counter()
    refuse_options("a profile is of one stage, and of one group", "pipeline_parallel_size", "attention_groups")
    refuse_options("compile seconds are measured, and a cache would hide them", "compilation_cache_dir")
    options: dict[str, Any] = engine_options() | {"compilation_cache_dir": ""}
    model = bench_model(flags.FLAGS.model, str(options["dtype"]), options["max_model_len"])
    multiple = _MULTIPLE.value or (8 if jax.default_backend() == "gpu" else 2)
    measurer = StepMeasurer(model, engine_config(options), multiple=multiple, min_seconds=_MIN_SECONDS.value)

    def progress(items, desc="steps"):
        from tqdm import tqdm

        return tqdm(items, desc=desc, mininterval=5)

    fitted, points = measurer.run(
        rounds=_ROUNDS.value, tolerance=_TOLERANCE.value, max_buckets=_MAX_BUCKETS.value, progress=progress
    )
    held_out = measurer.held_out(_HELD_OUT.value, options["seed"] + 1, rounds=_ROUNDS.value, progress=progress)
    limits, about = measurer.config.scheduler, provenance()
    about |= {
        "fitted": {"date": about["date"], "revision": about["revision"]},
        "model": flags.FLAGS.model,
        "model_shape": model_shape(measurer.config.model),
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "num_pages": measurer.config.cache.num_pages,
        "deterministic": measurer.config.deterministic,
        **{name: getattr(measurer.config.engine, name) for name in DEVICES},
        "multiple": multiple,
        "fit_error": fitted.error(points),
        "held_out_error": fitted.error(held_out),
        "spread": sorted(round(p.spread, 3) for p in points)[len(points) // 2],
        "seconds": round(time.perf_counter() - start, 1),
        "points": [vars(p) for p in points],
        "held_out": [vars(p) for p in held_out],
    }
    return replace(fitted, host_seconds=measurer.dispatch_seconds(), about=about)


def fitted_anew(path: str) -> Any:
    """The StepTimeModel of an earlier profile's points."""
    from jaxserve.step_times.fitted import StepTimeModel, refit

    model, now = refit(StepTimeModel.load(path)), provenance()
    return replace(model, about=model.about | {"fitted": {"date": now["date"], "revision": now["revision"], "points": path}})


@refuse_bad_input()
def main() -> None:
    if _POINTS.value is not None:
        refuse_flags("nothing is measured with --points", "model", "config", *_OF_MEASURING, *engine_flags())
    model = measured() if _POINTS.value is None else fitted_anew(_POINTS.value)
    model.save(_OUTPUT.value)
    about, error = model.about, model.about["held_out_error"]
    did = f"in {about['seconds']:.0f} s on {about['device']}" if _POINTS.value is None else f"fitted anew from {_POINTS.value}"
    print(
        f"{len(model.times)} buckets {did}; error on {error['num_points']} held-out "
        f"steps: median {100 * error['median']:.1f}%, p90 {100 * error['p90']:.1f}%, max {100 * error['max']:.1f}%; "
        f"median spread of a point {100 * about['spread']:.1f}%: {_OUTPUT.value}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run_command(main)
