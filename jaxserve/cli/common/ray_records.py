"""Records completed by engines on Ray: Ray Data shares them out in batches and brings the results back in order."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any

from jaxserve.cli.common.command import refuse_bad_input
from jaxserve.cli.common.fleet import gpus_per_replica, num_replicas, start_ray
from jaxserve.cli.common.records import ChatForm, Job, completions, result_of


class RecordEngine:
    """An actor of Ray Data: an engine that completes batches of jobs, each a line of JSON."""

    def __init__(self, form: ChatForm, engine: dict[str, Any]):
        from jaxserve import LLM

        self._form, self._llm = form, LLM(**engine)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        jobs = [Job(*json.loads(line)) for line in batch["job"]]
        done = completions(self._llm, jobs, self._form, progress=False)
        return {"result": [json.dumps(result_of(job.record, output), ensure_ascii=False) for job, output in done]}


def results_on_ray(
    jobs: Sequence[Job], form: ChatForm, engine: dict[str, Any], *, batch_size: int, progress: bool
) -> Generator[dict[str, Any]]:
    """Results of the jobs, in order, each when its batch and those before it are done.

    engine: arguments of `LLM`. batch_size: jobs that an engine gets at a time.

    Raises:
      UsageError: the cluster has too few GPUs or CPUs for --replicas engines.
    """
    import ray  # pyright: ignore[reportMissingImports]
    import ray.data  # pyright: ignore[reportMissingImports]

    from jaxserve.ray.resources import host_resources

    start_ray(ray)
    try:
        options = {name: value for name, value in engine.items() if name not in ("model", "tokenizer", "skip_tokenizer_init")}
        with refuse_bad_input():
            resources = host_resources(ray.cluster_resources(), options, num_replicas(), gpus_per_replica())
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = progress
        num_batches = max(1, -(-len(jobs) // batch_size))
        done = ray.data.from_items(_lines(jobs), override_num_blocks=num_batches).map_batches(
            RecordEngine,
            fn_constructor_kwargs={"form": form, "engine": engine},
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=num_replicas()),
            num_cpus=resources["num_cpus"],
            num_gpus=resources["num_gpus"],
        )
        for row in done.iter_rows():
            yield json.loads(row["result"])
    finally:
        ray.shutdown()


def _lines(jobs: Sequence[Job]) -> list[dict[str, str]]:
    """The jobs as Ray's object store gets them, which then has the only copy."""
    return [{"job": json.dumps([job.number, job.record, job.params])} for job in jobs]
