"""What many prompts take beside their engines, which echo them here, as JSON: `python -m tests.ray.echoing NUM_PROMPTS`."""

import json
import resource
import sys
import time
from typing import Any

from absl import flags

from jaxserve.cli.common import ray_records
from jaxserve.cli.common.records import ChatForm, Job

PROMPT = "The quick brown fox jumps over the lazy dog. " * 11  # 495 characters


class Echo:
    """In place of RecordEngine."""

    def __init__(self, form: ChatForm, engine: dict[str, Any]):
        pass

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        jobs = [Job(*json.loads(line)) for line in batch["job"]]
        return {"result": [json.dumps(job.record | {"number": job.number}) for job in jobs]}


def peak_mib() -> int:
    """Of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10


def main() -> None:
    num_prompts = int(sys.argv[1])
    flags.FLAGS(["echoing", "--ray", "--replicas=2"])
    ray_records.RecordEngine = Echo  # pyright: ignore[reportAttributeAccessIssue]
    params = {"max_tokens": 128, "n": 1, "ignore_eos": False}
    jobs = [Job(i, {"prompt": PROMPT + str(i)}, dict(params)) for i in range(num_prompts)]
    read, began, num_right = peak_mib(), time.monotonic(), 0
    for i, result in enumerate(ray_records.results_on_ray(jobs, ChatForm(), {}, batch_size=512, progress=False)):
        num_right += result == {"prompt": PROMPT + str(i), "number": i}
    seconds = time.monotonic() - began
    print(json.dumps({"right": num_right, "seconds": round(seconds, 1), "mib_of_prompts": read, "mib_at_most": peak_mib()}))


if __name__ == "__main__":
    main()
