"""The limits that a scheduler and its page pool are made with, checked on construction.

Owns SchedulerConfig, CacheConfig, and the checks of plain values that an engine's configuration shares with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.scheduling.policies import BATCHING_POLICIES, ORDERS, BatchingPolicy

DEFAULT_PAGE_SIZE = 64  # on a CPU too: XLA gathers whole pages, and pages of 16 made a decode step up to a third slower


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def integer(least: int | None) -> str:
    """What an error calls an integer of at least `least`; None: any integer."""
    return "an integer" if least is None else f"an integer >= {least}"


def check_integer(least: int | None, **values: Any) -> None:
    for name, value in values.items():
        require(is_int(value) and (least is None or value >= least), f"{name}={value!r} must be {integer(least)}")


def require_one_of(choices: tuple[str, ...], **values: Any) -> None:
    for name, value in values.items():
        require(value in choices, f"{name}={value!r} must be one of {', '.join(choices)}")


def check_within_budget(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    require(
        max_num_seqs <= max_num_batched_tokens,
        f"max_num_seqs={max_num_seqs} must not exceed max_num_batched_tokens={max_num_batched_tokens}: "
        "a step must hold one token of every running sequence; raise the budget or lower max_num_seqs",
    )


def check_power_of_two(page_size: int) -> None:
    require(page_size & (page_size - 1) == 0, f"page_size={page_size} must be a power of two, such as 16 or 64")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step and the rules by which it is composed.

    max_model_len: most tokens (prompt + output) of a request.
    max_num_batched_tokens: the token budget of a step.
    max_num_seqs: most sequences running at once.
    policy: how a step is composed (policies.py).
    order: which request is admitted first, and preempted last.
    chunked, mixed: whether prompts are chunked, and whether a step mixes prompts and decodes. None: as the policy has it.
    long_prefill_token_threshold: most prompt tokens of one request in a step while another waits. 0: no cap.
    num_groups: of devices, each of which attends to requests of its own. A group has an equal part of max_num_batched_tokens and of
      the max_num_seqs rows, and pages of its own.

    Raises:
      ValueError: a value out of its range; groups that do not divide the limits.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    policy: str = "sarathi"
    order: str = "fcfs"
    chunked: bool | None = None
    mixed: bool | None = None
    long_prefill_token_threshold: int = 0
    num_groups: int = 1

    def __post_init__(self) -> None:
        check_integer(
            1,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            num_groups=self.num_groups,
        )
        check_groups(self.num_groups, max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)
        check_integer(0, long_prefill_token_threshold=self.long_prefill_token_threshold)
        check_within_budget(self.max_num_seqs, self.max_num_batched_tokens)
        require_one_of(tuple(BATCHING_POLICIES), policy=self.policy)
        require_one_of(ORDERS, order=self.order)


def check_groups(num_groups: int, **limits: int) -> None:
    """ValueError for a limit of a step that groups of devices can't have equal parts of."""
    for name, size in limits.items():
        must = f"must be a multiple of attention_groups={num_groups}: each has an equal part"
        require(size % num_groups == 0, f"{name}={size} {must}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. page_size: tokens of a page, a power of two. num_pages: pages of the pool, the same in every layer.

    Raises:
      ValueError: a value out of its range.
    """

    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_integer(1, page_size=self.page_size, num_pages=self.num_pages)
        check_power_of_two(self.page_size)


def resolve_policy(config: SchedulerConfig) -> BatchingPolicy:
    """The policy that `config` names, with its `chunked` and `mixed` switches applied.

    Raises:
      ValueError: the switches contradict the policy or each other.
    """
    policy = BATCHING_POLICIES[config.policy]
    if config.chunked is not None:
        policy = replace(policy, chunked=config.chunked)
    if config.mixed is not None:
        policy = replace(policy, mixed=config.mixed)
    if config.policy == "prefill_first" and policy.mixed:
        raise ValueError(
            "policy='prefill_first' with mixed=True has no step left to put first; use policy='sarathi' with chunked=False"
        )
    if config.long_prefill_token_threshold and not policy.chunked:
        raise ValueError(
            f"long_prefill_token_threshold={config.long_prefill_token_threshold} caps the chunks of a prompt, but "
            f"policy={config.policy!r} with chunked={config.chunked} runs prompts whole; set chunked=True, or the threshold to 0"
        )
    return policy
