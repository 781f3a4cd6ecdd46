"""What a user can choose about an engine: EngineConfig, one table of fields, checked on construction.

The checks, the commands' flags and the page of options are made from the table. Knows no model and no device:
execution/resolved_config.py decides what is left open.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.buckets.plan import BucketPlan
from jaxserve.kv_store import spec as kv_stores
from jaxserve.models import config as models
from jaxserve.moved import forward
from jaxserve.scheduling import config as scheduling
from jaxserve.scheduling import policies
from jaxserve.scheduling.config import check_power_of_two, check_within_budget, require
from jaxserve.speculative.config import SpeculativeConfig
from kernels.backends import ALL_REDUCE, ATTENTION, FUSED_MATMUL, GROUPED_MATMUL

WARM_UPS = ("all", "background", "first_use")
BACKENDS = ATTENTION.names
MATMUL_BACKENDS = FUSED_MATMUL.names  # of dense matmuls with norm and gate
MOE_BACKENDS = GROUPED_MATMUL.names  # of a mixture of experts' matmuls
ALL_REDUCE_BACKENDS = ALL_REDUCE.names  # of sums over devices
DETERMINISTIC = ("auto", "bucket", "always")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field of EngineConfig may be, and what is said of it.

    group: its heading in help and on the page of options. help: one line, without what None means. unset: what None means; None is
    no value of a field that has no `unset`. choices: of a name, all of them.
    """

    group: str
    help: str
    unset: str = ""
    choices: tuple[str, ...] = ()

    @property
    def must(self) -> str:
        """What an error says that the value must be, None aside."""
        return f"one of {', '.join(self.choices)}"

    def check(self, name: str, value: Any) -> None:
        """ValueError that names the option, the value and what it may be."""
        self._require(value in self.choices, name, value)

    def _require(self, ok: bool, name: str, value: Any) -> None:
        require(ok, f"{name}={value!r} must be {self.must}{', or None' if self.unset else ''}")


@dataclass(frozen=True, kw_only=True)
class Count(Option):
    """An integer, at least `least` where there is one."""

    least: int | None = 1

    @property
    def must(self) -> str:
        return scheduling.integer(self.least)

    def check(self, name: str, value: Any) -> None:
        scheduling.check_integer(self.least, **{name: value})


@dataclass(frozen=True, kw_only=True)
class PageSize(Count):
    """A Count that is a power of two."""

    @property
    def must(self) -> str:
        return "a power of two"

    def check(self, name: str, value: Any) -> None:
        super().check(name, value)
        check_power_of_two(value)


@dataclass(frozen=True, kw_only=True)
class Measure(Option):
    """A number above 0, and not above `most` where there is one. of: what it counts."""

    most: float | None = None
    of: str = "a number"

    @property
    def must(self) -> str:
        return f"{self.of} above 0" if self.most is None else f"{self.of} in (0, {self.most:g}]"

    def check(self, name: str, value: Any) -> None:
        ok = isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) <= (self.most or math.inf)
        self._require(ok, name, value)


@dataclass(frozen=True, kw_only=True)
class Switch(Option):
    """True or False."""

    @property
    def must(self) -> str:
        return "True or False"

    def check(self, name: str, value: Any) -> None:
        self._require(isinstance(value, bool), name, value)


@dataclass(frozen=True, kw_only=True)
class File(Option):
    """A path."""

    @property
    def must(self) -> str:
        return "a path"

    def check(self, name: str, value: Any) -> None:
        self._require(isinstance(value, (str, os.PathLike)), name, value)


@dataclass(frozen=True, kw_only=True)
class Parsed(Option):
    """What a class of its own reads and checks. forms: in which it may be given."""

    forms: str

    @property
    def must(self) -> str:
        return self.forms

    def check(self, name: str, value: Any) -> None:
        pass  # by the class, when it is read


@dataclass(frozen=True, kw_only=True)
class KVStoreOption(Option):
    """The tiers of a store of KV."""

    @property
    def must(self) -> str:
        return kv_stores.FORMS

    def check(self, name: str, value: Any) -> None:
        kv_stores.parse_kv_store(value)


def _option(default: Any, option: Option) -> Any:
    return field(default=default, metadata={"option": option})


_NAMES, _LIMITS, _STEPS, _PROGRAMS, _DRAFTS = "Weights and kernels", "Limits and memory", "Scheduling", "Programs", "Speculation"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a user can choose about an engine. docs/options.md lists the fields, which `options()` gives as data.

    None means decided by `engine.resolution.resolve` from the model and the device.

    Raises:
      ValueError: a value is of the wrong type or out of range, or the plan or the profile can't be read; the message names it and
        what it may be.
    """

    dtype: str = _option(
        "auto",
        Option(
            group=_NAMES,
            choices=models.DTYPES,
            help="Of weights and activations; auto: the checkpoint's own (bfloat16 for quantised GGUF).",
        ),
    )
    tensor_parallel_size: int = _option(
        1,
        Count(
            group=_NAMES,
            help="Devices that share the model: heads, columns of the MLP, experts and the vocabulary are cut over them.",
        ),
    )
    pipeline_parallel_size: int = _option(
        1,
        Count(
            group=_NAMES,
            help="Stages of a pipeline, each with its layers on devices of its own (tensor_parallel_size of them) and one "
            "micro-batch in flight.",
        ),
    )
    attention_groups: int = _option(
        1,
        Count(
            group=_NAMES,
            help="Groups in which the devices attend, each to requests of its own with KV pages of its own; it divides "
            "tensor_parallel_size.",
        ),
    )
    max_model_len: int | None = _option(
        None,
        Count(
            group=_LIMITS,
            help="Most tokens of a request, prompt and output.",
            unset="the model's own length, or what the pool holds",
        ),
    )
    max_num_seqs: int | None = _option(
        None,
        Count(
            group=_LIMITS,
            help="Most sequences of a step.",
            unset=f"{scheduling.SchedulerConfig.max_num_seqs}, or what the plan holds",
        ),
    )
    max_num_batched_tokens: int | None = _option(
        None,
        Count(
            group=_LIMITS,
            help="Token budget of a step.",
            unset=f"{scheduling.SchedulerConfig.max_num_batched_tokens}, what the plan holds, or the longest prompt if not chunked",
        ),
    )
    page_size: int | None = _option(
        None,
        PageSize(
            group=_LIMITS,
            help="Tokens of a KV page, a power of two.",
            unset=f"{scheduling.DEFAULT_PAGE_SIZE}",
        ),
    )
    num_pages: int | None = _option(
        None,
        Count(
            group=_LIMITS,
            help="KV pages of the pool; of each group's, with attention_groups.",
            unset="as many as fit, and never more than max_num_seqs requests of max_model_len could use",
        ),
    )
    gpu_memory_utilization: float = _option(
        0.9,
        Measure(
            group=_LIMITS,
            most=1,
            help="Share of the device's memory for weights, programs and the pool together; on a CPU of a quarter of the "
            "machine's, and at most 1 GiB for the pool.",
        ),
    )
    enable_prefix_caching: bool = _option(
        scheduling.CacheConfig.enable_prefix_caching, Switch(group=_LIMITS, help="Requests share the KV pages of equal prefixes.")
    )
    kv_store: str | None = _option(
        None,
        KVStoreOption(
            group=_LIMITS,
            help="Where full KV pages are kept beyond the pool: 'host:4GiB' in memory, 'disk:FOLDER:100GiB' in files, "
            "'nixl:HOST:PORT+HOST:PORT:4GiB', or 'mooncake:' likewise, in memory that engines at the further addresses read; or "
            "several with commas. Prompts that begin alike load them instead of being computed.",
            unset="nowhere",
        ),
    )
    kv_store_write_policy: str = _option(
        "auto",
        Option(
            group=_LIMITS, choices=("auto", "write_through"), help="Give kv_store all pages, or (auto) fewer while none is hit."
        ),
    )
    enable_chunked_prefill: bool | None = _option(
        None,
        Switch(group=_STEPS, help="A long prompt may be split over steps.", unset="the batching policy's choice"),
    )
    enable_mixed_steps: bool | None = _option(
        None,
        Switch(group=_STEPS, help="Prompts and decodes may share a step.", unset="the batching policy's choice"),
    )
    scheduling_policy: str = _option(
        scheduling.SchedulerConfig.order, Option(group=_STEPS, choices=policies.ORDERS, help="Who comes first.")
    )
    batching_policy: str = _option(
        scheduling.SchedulerConfig.policy,
        Option(group=_STEPS, choices=tuple(policies.BATCHING_POLICIES), help="How a step is composed."),
    )
    long_prefill_token_threshold: int = _option(
        scheduling.SchedulerConfig.long_prefill_token_threshold,
        Count(
            group=_STEPS,
            least=0,
            help="Most prompt tokens of one request a step while another waits; 0: no cap.",
        ),
    )
    tbt_slo_ms: float | None = _option(
        None,
        Measure(
            group=_STEPS,
            of="milliseconds",
            unset="budgets are fixed",
            help="Dynamic budget: beside decodes, as many prompt tokens as keep the step's predicted time within it.",
        ),
    )
    step_times: str | Path | None = _option(
        None,
        File(
            group=_STEPS, help="The JSON of `jaxserve tune profile` for this machine, which predicts steps.", unset="no prediction"
        ),
    )
    seed: int = _option(0, Count(group=_STEPS, least=None, help="Seeds requests that bring no seed."))
    bucket_plan: BucketPlan | str | Path | dict[str, Any] | None = _option(
        None,
        Parsed(
            group=_PROGRAMS,
            forms="a path, a BucketPlan or its dict",
            help="The shapes to compile: a JSON file that `jaxserve tune buckets` writes; in Python also a BucketPlan or its dict.",
            unset="the default plan, powers of two up to the limits",
        ),
    )
    warm_up: str = _option(
        "first_use",
        Option(
            group=_PROGRAMS,
            choices=WARM_UPS,
            help="When the plan's programs are compiled. all: at start; background: a few at start and the rest on a thread behind "
            "the steps; first_use: each when it is first needed. Until all of background's are done a step may run in a larger "
            "bucket, and results may differ in their last bits.",
        ),
    )
    async_scheduling: bool = _option(
        True, Switch(group=_STEPS, help="Schedule and dispatch a step before the tokens of the last one are back.")
    )
    attention_backend: str = _option(
        "auto",
        Option(
            group=_NAMES,
            choices=BACKENDS,
            help="Of attention; auto: mosaic_sm90 on Hopper, mosaic_portable from sm_80 on, cpu on one CPU, where they fit, else "
            "xla.",
        ),
    )
    matmul_backend: str = _option(
        "auto",
        Option(
            group=_NAMES,
            choices=MATMUL_BACKENDS,
            help="Of dense matmuls with norm and gate (kernels/fused_matmul); auto: mosaic_sm90 on Hopper in bfloat16, cpu on one "
            "CPU, else xla.",
        ),
    )
    moe_backend: str = _option(
        "auto", Option(group=_NAMES, choices=MOE_BACKENDS, help="Of a mixture of experts' matmuls (kernels/grouped_matmul).")
    )
    num_threads: int | None = _option(
        None,
        Count(
            group=_PROGRAMS,
            help="Threads that compute the kernels for CPUs, of all engines of a process: the last one to start decides. XLA's own "
            "threads are not counted.",
            unset="the CPUs that the process may use",
        ),
    )
    deterministic: str = _option(
        "auto",
        Option(
            group=_PROGRAMS,
            choices=DETERMINISTIC,
            help="What a request's tokens and log-probabilities do not depend on, to the last bit. bucket: the batch, chunking, "
            "preemption and prefix hits, among steps of one bucket; always: the bucket neither; auto: always where it costs "
            "nothing, which is for a dense model on one CPU that our kernels compute; else bucket.",
        ),
    )
    graph_collectives: bool = _option(
        False,
        Switch(
            group=_PROGRAMS,
            help="On several GPUs: CUDA graphs hold the sums over devices too, so that a program is one graph. Otherwise they run "
            "between graphs.",
        ),
    )
    all_reduce_backend: str = _option(
        "auto",
        Option(
            group=_PROGRAMS,
            choices=ALL_REDUCE_BACKENDS,
            help="Of sums over several devices; auto: in_order where CPU devices belong to several processes, else xla. in_order: "
            "on CPUs, gathered and added from the first device to the last. mosaic: messages of a decode are read over NVLink and "
            "added in one order by a kernel for Hopper, which no card has run; xla sums larger ones.",
        ),
    )
    skip_qualification: bool = _option(
        False,
        Switch(
            group=_NAMES,
            help="Use our kernels on a GPU that has not tried them. Otherwise the first start on a card, driver, JAX or revision "
            "of the kernels tries them, within 300 s, and auto leaves out what fails (`jaxserve qualify`).",
        ),
    )
    compilation_cache_dir: str | None = _option(
        None,
        File(
            group=_PROGRAMS,
            help="JAX's persistent compilation cache; \"\" leaves JAX's own setting alone.",
            unset="a folder of the user's",
        ),
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = _option(
        None,
        Parsed(
            group=_DRAFTS,
            forms="JSON, or a dict",
            unset="no drafts",
            help="""Drafts, as JSON: '{"method": "ngram", "num_speculative_tokens": 4}'; in Python also a dict. """
            "Other methods are suffix, draft_model, eagle, eagle3 and medusa; the last four need a model.",
        ),
    )
    demand_log: str | None = _option(
        None, File(group=_PROGRAMS, help="A file to which each step's demand is appended, one JSON line a step.", unset="none")
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # numpy's integers too
                object.__setattr__(self, each.name, int(value))
        object.__setattr__(self, "dtype", models.DTYPE_ALIASES.get(str(self.dtype), self.dtype))
        for name, (_, option) in options().items():
            value = getattr(self, name)
            if value is not None or not option.unset:
                option.check(name, value)
        if self.max_num_seqs is not None and self.max_num_batched_tokens is not None:
            check_within_budget(self.max_num_seqs, self.max_num_batched_tokens)
        said = "go together: an objective, and a profile to predict steps"
        given = f"tbt_slo_ms={self.tbt_slo_ms!r} and step_times={self.step_times!r}"
        require((self.tbt_slo_ms is None) == (self.step_times is None), f"{given} {said}")
        said = "keeps pages by the prefix cache's hashes, and enable_prefix_caching is False: leave one of them out"
        require(self.kv_store is None or self.enable_prefix_caching, f"kv_store={self.kv_store!r} {said}")
        policy = self.kv_store_write_policy
        require(policy == "auto" or self.kv_store is not None, f"kv_store_write_policy={policy!r} is of a kv_store: give one")
        # Read now: a bad file should not wait for the weights to load.
        object.__setattr__(self, "bucket_plan", _read_plan(self.bucket_plan))
        if self.step_times is not None:
            from jaxserve.step_times.fitted import StepTimeModel

            StepTimeModel.load(self.step_times)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.make(self.speculative_config))
        drafts_by = self.speculative.model if self.speculative is not None and self.speculative.keeps_pages else None
        if self.kv_store is not None and drafts_by is not None:
            raise NotImplementedError(
                f"kv_store={self.kv_store!r} keeps the target's pages, and not those of model={drafts_by!r} in speculative_config: "
                "leave one of them out"
            )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """speculative_config, as the one that was made of whatever was given."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config


def options() -> dict[str, tuple[Field[Any], Option]]:
    """The table: an option's name -> its field of EngineConfig (with the default), and what is said of it."""
    return {each.name: (each, each.metadata["option"]) for each in fields(EngineConfig)}


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keyword options. TypeError names an unknown one and lists those that exist."""
    known = [f.name for f in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; options are {', '.join(known)}")
    return EngineConfig(**options)


def _described() -> str:
    """The table as a docstring's Args."""
    lines = ["Args:"]
    for name, (each, option) in options().items():
        unset = f" None: {option.unset}." if option.unset else f" Default: {each.default!r}."
        choices = f" One of {', '.join(option.choices)}." if option.choices else ""
        lines.append(f"  {name}: {option.help}{choices}{unset}")
    return "\n    ".join(lines)


EngineConfig.__doc__ = str(EngineConfig.__doc__).replace("Raises:", f"{_described()}\n\n    Raises:")


def _read_plan(plan: Any) -> BucketPlan | None:
    if plan is None or isinstance(plan, BucketPlan):
        return plan
    ok = isinstance(plan, (str, os.PathLike, dict))
    require(ok, f"bucket_plan={plan!r} must be a BucketPlan, the path of its JSON, what that JSON holds, or None")
    try:
        return BucketPlan.from_dict(plan) if isinstance(plan, dict) else BucketPlan.load(plan)
    except (OSError, ValueError) as error:
        raise ValueError(f"bucket_plan={str(plan)!r} cannot be used: {error}") from error


if not TYPE_CHECKING:
    __getattr__ = forward(__name__)
