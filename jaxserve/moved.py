"""Where public modules went when jaxserve was put in order. For one release an old name still works, and warns with the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc imports importlib.resources, which takes longer than `import jaxserve`

MODULES: dict[str, tuple[str, ...]] = {  # old name below jaxserve -> modules that have what it had
    "admission": ("engine.admission",),
    "batch": ("batching.packer",),
    "beam_search": ("engine.beam_search",),
    "compilation": ("execution.compilation",),
    "demand": ("scheduling.demand",),
    "edit_rows": ("sampling.edit_rows",),
    "engine_outputs": ("engine.stats", "request"),
    "latency": ("workloads.latency",),
    "logit_edits": ("sampling.logit_edits",),
    "memory": ("execution.memory",),
    "model_loader": ("models.loading",),
    "page_pool": ("scheduling.page_pool",),
    "params": ("models.adoption",),
    "policies": ("scheduling.policies", "scheduling.config"),
    "programs": ("execution.programs",),
    "progress": ("engine.progress",),
    "prompt_scores": ("sampling.prompt_scores", "outputs"),
    "resolution": ("engine.resolution",),
    "runner": ("execution.runner",),
    "sampling_rows": ("sampling.rows",),
    "schedule": ("scheduling.schedule",),
    "scheduler": ("scheduling.scheduler",),
    "scoring": ("sampling.scoring",),
    "sequence_pages": ("scheduling.sequence_pages",),
    "sequence_rows": ("scheduling.sequence_rows",),
    "serving.router": ("routing.app",),
    "serving.router_backends": ("routing.backends",),
    "serving.router_metrics": ("routing.metrics",),
    "serving.router_policy": ("routing.policy",),
    "simulation.analytic": ("step_times.analytic",),
    "simulation.books": ("simulation.records",),
    "simulation.hardware": ("step_times.hardware",),
    "simulation.measure": ("engine.measure",),
    "simulation.model_shapes": ("step_times.model_shapes",),
    "simulation.operators": ("step_times.operators",),
    "simulation.step_time": ("step_times.fitted",),
    "simulation.unpadded": ("buckets.unpadded",),
    "step": ("execution.model_functions", "execution.body", "execution.head", "execution.device_state", "batching.context"),
    "step_budget": ("scheduling.step_budget",),
    "structured.params": ("structured_outputs",),
    "text_outputs": ("text.text_outputs",),
    "tokenizer": ("text.tokenizer", "text.detokenizer"),
    "traffic": ("workloads.traffic",),
    "waiting_queue": ("scheduling.waiting_queue",),
    "work_lists": ("batching.work_lists",),
}
STAYED: dict[str, dict[str, str]] = {  # modules and packages that are there still -> what they had besides -> where that went
    "buckets": {
        "PaddingAccount": "buckets.padding",
        **dict.fromkeys(("Bucket", "BucketPlan", "MAX_PROGRAMS", "HEAD_VARIANTS", "OTHER_PROGRAMS", "DRAFT_SEQS"), "buckets.plan"),
    },
    "config": {
        "DTYPES": "models.config",
        "ORDERS": "scheduling.policies",
        "ResolvedConfig": "execution.resolved_config",
        **dict.fromkeys(("SchedulerConfig", "CacheConfig", "DEFAULT_PAGE_SIZE", "require_one_of"), "scheduling.config"),
    },
    "engine": {"Engine": "engine.engine"},
    "llm": dict.fromkeys(("Message", "Prompt", "PROMPT_FIELDS", "with_bad_words_tokenized"), "text.prompts"),
    "request": {
        **dict.fromkeys(("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "ScoreOutput"), "outputs"),
        **dict.fromkeys(
            ("SamplingParams", "MAX_LOGPROBS", "MAX_SUPPRESSED_IDS", "MAX_LOGIT_BIAS", "MAX_BAD_WORDS", "MAX_BAD_WORD_TOKENS"),
            "sampling_params",
        ),
    },
    "sampling": dict.fromkeys(
        ("SamplingRows", "Sampled", "TokenLogprobs", "sample", "process_logits", "draw_token", "uniform", "token_logprobs"),
        "sampling.sampler",
    ),
    "serving.async_llm": {"Ask": "serving.streams", "RequestStream": "serving.streams", "SHORT": "serving.reading"},
    "structured": {"StructuredOutputsParams": "structured_outputs"},
    "workloads": dict.fromkeys(
        ("WORKLOADS", "Workload", "WorkloadRequest", "fixed", "nano_vllm", "random_lengths", "sharegpt", "trace"),
        "workloads.workload",
    ),
}

RENAMED: dict[str, dict[str, str]] = {  # old module -> what it had -> its new place and name
    "config": {"POLICIES": "scheduling.policies.BATCHING_POLICIES"},
    "params": {"flat_params": "models.adoption.flat_weights"},
    "policies": {"POLICIES": "scheduling.policies.BATCHING_POLICIES", "Policy": "scheduling.policies.BatchingPolicy"},
    "serving.chat_protocol": {"Message": "serving.chat_protocol.ChatMessage"},
    "serving.generation": {"Books": "serving.generation.CallRecord"},
    "serving.messages": {"RequestBooks": "serving.messages.RequestTotals"},
    "serving.protocol": {"Prompt": "serving.protocol.CompletionPrompt"},
    "serving.router": {"METHODS": "routing.app.HTTP_METHODS"},
    "serving.router_backends": {"Health": "routing.health.BackendHealth"},
    "serving.router_metrics": {"PREFIX": "routing.metrics.ROUTER_PREFIX"},
    "serving.router_policy": {"POLICIES": "routing.policy.ROUTING_POLICIES", "Policy": "routing.policy.RoutingPolicy"},
    "simulation.books": {"RequestBooks": "simulation.records.RequestRecords", "StepBooks": "simulation.records.StepRecords"},
}
GONE: dict[str, dict[str, str]] = {  # old module -> what it had that has no successor -> what to use
    "batch": dict.fromkeys(("head_rows", "num_head_rows"), "jaxserve.scheduling.schedule.LogitsRows has these rows"),
    "config": {
        "DEFAULT_NUM_BATCHED_TOKENS": "jaxserve.scheduling.config.SchedulerConfig.max_num_batched_tokens is that default",
        "DEFAULT_NUM_SEQS": "jaxserve.scheduling.config.SchedulerConfig.max_num_seqs is that default",
    },
    "engine_outputs": dict.fromkeys(
        ("first_rows", "rows_of_requests"), "jaxserve.scheduling.schedule.LogitsRows has them as firsts and by_request"
    ),
    "simulation.decode_runs": {"skip_steps": "jaxserve.scheduling.scheduler.Scheduler.skip_decodes does this"},
    "step": {"update_state": "jaxserve.execution.device_state.update_rows takes and returns a RowState"},
}


def forward(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module: what it had before, from where that is now, with a DeprecationWarning that says so.

    Raises (when called):
      AttributeError: no place has it; the message says what to use where the name went without a successor.
    """
    old = module.removeprefix("jaxserve.")
    homes = MODULES.get(old, ())

    def find(name: str) -> Any:
        if name in GONE.get(old, ()):
            raise AttributeError(f"{module}.{name} is gone: {GONE[old][name]}")
        for place in _places(old, name):
            home, _, new_name = place.rpartition(".")
            found = import_module(f"jaxserve.{home}")
            if new_name in vars(found):
                new = f"jaxserve.{new_name}" if new_name in sys.modules["jaxserve"].__all__ else f"jaxserve.{place}"
                warnings.warn(f"{module}.{name} is {new} now; the old name goes with the next release", DeprecationWarning, 2)
                return getattr(found, new_name)
        see = f"; see {', '.join(f'jaxserve.{home}' for home in homes)}" if homes else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{see}")

    return find


def _places(old: str, name: str) -> list[str]:
    """Where a name of an old module may be now, below jaxserve."""
    if name in RENAMED.get(old, ()):
        return [RENAMED[old][name]]
    if name in STAYED.get(old, ()):
        return [f"{STAYED[old][name]}.{name}"]
    return [] if name.startswith("__") else [f"{home}.{name}" for home in MODULES.get(old, ())]


class _Finder(Loader):
    """Makes a module of an old name that is empty but for `forward`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "jaxserve" and name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = forward(module.__name__)


def install() -> None:
    """Lets old modules be imported. Once a process is enough, and more do no harm."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
