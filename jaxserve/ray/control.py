"""Control calls of replicas: the one that gets a call asks all of them, itself too, and answers with what each said.

Ray Serve gives a request to one replica, and has no call for all of them. So each is asked by the handle of its actor, as Ray's own
server of language models does it (ray/llm/_internal/serve/utils/broadcast.py, Ray 2.60).
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Mapping
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.serve._private.common import RequestMetadata  # pyright: ignore[reportMissingImports]
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE  # pyright: ignore[reportMissingImports]

from jaxserve.serving.control import ControlCall
from jaxserve.serving.fleet_answers import FleetAnswer, Said, answer_of_all
from jaxserve.serving.messages import UnavailableError

METHOD = "control"  # of a replica, which takes a ControlCall
ENDING = ("STOPPING", "STOPPED")  # states of replicas that get no more requests


async def ask_replicas(call: ControlCall) -> tuple[int, FleetAnswer]:
    """Asks all replicas of this one's deployment at once. Returns as `answer_of_all`, by the replicas' ids.

    Raises:
      UnavailableError: Ray's controller, which knows the replicas, does not answer.
    """
    context = serve.get_replica_context()
    try:
        controller = await _actor(SERVE_CONTROLLER_NAME)
        known = await controller.get_serve_instance_details.remote()
    except (RayError, ValueError) as error:
        raise UnavailableError(f"Ray Serve's controller does not say which replicas there are: {_in_words(error)}") from error
    replicas = known["applications"][context.app_name]["deployments"][context.deployment]["replicas"]
    replicas = [replica for replica in replicas if replica["state"] not in ENDING]
    said = await asyncio.gather(*(_ask(replica, call) for replica in replicas))
    return answer_of_all({replica["replica_id"]: one for replica, one in zip(replicas, said, strict=True)})


async def _ask(replica: Mapping[str, Any], call: ControlCall) -> Said:
    """replica: as Ray's controller describes it."""
    if replica["state"] == "STARTING":
        return Said(error="it is being started: ask again when it answers")
    name = f"control-{uuid.uuid4().hex}"
    metadata = RequestMetadata(request_id=name, internal_request_id=name, call_method=METHOD)
    try:
        actor = await _actor(replica["actor_name"])
        status, body = await actor.handle_request.remote(pickle.dumps(metadata), call)
    except (RayError, ValueError) as error:
        return Said(error=_in_words(error))
    return Said.of(status, body)


async def _actor(name: str) -> Any:
    """Ray Serve's actor of this name. ValueError: there is none."""
    return await asyncio.to_thread(ray.get_actor, name, namespace=SERVE_NAMESPACE)  # it blocks


def _in_words(error: Exception) -> str:
    """An error in a line: Ray's own begin with what is wrong, and those of tasks have a traceback."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
