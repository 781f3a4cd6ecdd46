"""What a replica says of its start if the other host ends before it joins, as JSON: `python -m tests.ray.starting`."""

import importlib
import json
import os
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jaxserve.cli.common.fleet import start_ray

ray: Any = importlib.import_module("ray")
WAYS = ("raises", "dies")


def start_without(how: str) -> str:
    from jaxserve.ray import hosts

    class Follower:
        def run(self, *_: object) -> None:
            if how == "raises":
                raise ValueError("its libraries are\nothers")
            os._exit(7)

    hosts.Follower = Follower  # pyright: ignore[reportAttributeAccessIssue]
    try:
        hosts.ReplicaHosts(2, "nothing", {}).join()
    except RuntimeError as error:
        return str(error)
    return "they have met"


def main() -> None:
    start_ray(ray)
    placement = ray.util.placement_group([{"CPU": 1}] * 2)
    where = PlacementGroupSchedulingStrategy(placement, 0, placement_group_capture_child_tasks=True)
    leader = ray.remote(start_without).options(scheduling_strategy=where, num_cpus=1, max_retries=0)
    print(json.dumps({how: ray.get(leader.remote(how)) for how in WAYS}))
    ray.shutdown()


if __name__ == "__main__":
    main()
