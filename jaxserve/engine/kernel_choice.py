"""Which kernels an engine runs: what the user asks for, what "auto" is on this device, and what its qualification leaves out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.engine.resolution import check_options
from jaxserve.execution.model_functions import LayerKernels
from jaxserve.models import ModelConfig
from jaxserve.qualification.card import find_card
from jaxserve.qualification.qualify import Qualification, qualify
from jaxserve.scheduling.config import DEFAULT_PAGE_SIZE
from kernels.backends import ATTENTION, FUSED_MATMUL, current_platform
from kernels.cpu import library
from kernels.fused_matmul import resolve_backend as resolve_fused_matmul
from kernels.grouped_matmul import resolve_backend as resolve_grouped_matmul
from kernels.qualification.plan import Ask, Plan
from kernels.ragged_paged_attention import resolve_backend as resolve_attention
from kernels.rotary_write import resolve_backend as resolve_rotary_write

logger: logging.Logger = logging.getLogger("jaxserve")

NO_CARD, SKIPPED = "none: no GPU here", "skipped"


@dataclass(frozen=True)
class KernelChoice:
    """What an engine runs. layer: beside the attention; its rotary is "xla" where the attention is. qualification: None where none
    was asked for."""

    attention: str
    layer: LayerKernels
    qualification: Qualification | None = None
    skipped: bool = False

    @property
    def said(self) -> str:
        """The qualification in a line."""
        return SKIPPED if self.skipped else NO_CARD if self.qualification is None else str(self.qualification)


def kernel_plan(model: ModelConfig, dtype: Any, config: EngineConfig, platform: str, draft: ModelConfig | None = None) -> Plan:
    """What a card must be asked before an engine of this model and config chooses its kernels. draft: of what drafts, if it
    attends."""
    dtype = jnp.dtype(dtype).name
    heads: dict[str, Any] = _heads(model) | {"page_size": config.page_size or DEFAULT_PAGE_SIZE, "dtype": dtype}
    attention = heads | {
        "sliding_windows": _windows(model),
        "num_drafts": 0 if config.speculative is None else config.speculative.num_speculative_tokens,
    }
    if draft is not None and not (_heads(draft) == _heads(model) and set(_windows(draft)) <= set(_windows(model))):
        attention["draft"] = _heads(draft) | {"sliding_windows": _windows(draft)}
    experts = {
        "num_experts": model.num_experts,
        "num_choices": model.num_experts_per_token,
        "products": _products(model),
        "dtype": dtype,
    }
    asks = {
        "attention": Ask(config.attention_backend, attention),
        "rotary_write": Ask("auto" if _may_be_ours(config.attention_backend) else "xla", heads | {"norm": model.qk_norm}),
        "fused_matmul": Ask(config.matmul_backend, {"weights": _fused_weights(model, config), "dtype": dtype}),
        "grouped_matmul": Ask(config.moe_backend, experts if model.sparse_layers else None),
    }
    return Plan(asks, platform=platform, small=platform != "gpu")


def _heads(model: ModelConfig) -> dict[str, int]:
    return {"num_query_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


def _windows(model: ModelConfig) -> list[int | None]:
    return list(dict.fromkeys(model.sliding_windows))


def qualify_kernels(
    model: ModelConfig,
    dtype: Any,
    config: EngineConfig,
    *,
    ask_jax: bool,
    tried: Qualification | None = None,
    draft: ModelConfig | None = None,
) -> Qualification | None:
    """The verdict of this machine's card on the kernels of an engine, tried now where there is none; None without a GPU, or where
    the config skips it. ask_jax: see `find_card`. tried: what this start has found before, which is not tried twice where it is of
    the same card and plan. draft: as `kernel_plan`'s. Raises as `check_options`, before anything is tried."""
    if config.skip_qualification:
        return None
    card = find_card(ask_jax=ask_jax)
    if card is None:
        return None
    check_options(config, model, dtype, card.platform)
    plan = kernel_plan(model, dtype, config, card.platform, draft)
    if tried is not None and (tried.card, tried.plan) == (card, plan):
        return tried
    return qualify(card, plan)


def choose_kernels(
    model: ModelConfig,
    dtype: Any,
    config: EngineConfig,
    tried: Qualification | None = None,
    draft: ModelConfig | None = None,
) -> KernelChoice:
    """The backends of an engine's kernels on JAX's default device, of which none is "auto" (but moe without experts).

    Args:
      tried, draft: see `qualify_kernels`.

    Raises: NotImplementedError for a backend of attention or matmuls that was named and can't; as `qualify_kernels`.
    """
    resolve_attention_here, resolve_matmul_here = _resolvers(model, dtype, config)
    for named, resolve_here in ((config.attention_backend, resolve_attention_here), (config.matmul_backend, resolve_matmul_here)):
        if named != "auto":  # what it lacks is said before kernels are tried
            resolve_here()
    qualification = qualify_kernels(model, dtype, config, ask_jax=True, tried=tried, draft=draft)
    asked = {"attention": config.attention_backend, "fused_matmul": config.matmul_backend, "grouped_matmul": config.moe_backend}
    left_out: dict[str, dict[str, str]] = {kernel: {} for kernel in (*asked, "rotary_write")}
    if qualification is not None:
        left_out = {kernel: qualification.left_out(kernel) for kernel in left_out}
        _say(qualification, left_out, asked)
    if config.tensor_parallel_size > 1 and config.deterministic != "always":
        # Devices that are threads of one CPU would wait for one another's. With "always" they have one device's, and its bits.
        left_out = {kernel: {**said, "cpu": "several devices"} for kernel, said in left_out.items()}
    attention = resolve_attention_here(left_out=left_out["attention"])
    rotary = "xla"
    if not ATTENTION[attention].plain_xla:
        rotary = resolve_rotary_write("auto", head_dim=model.head_dim, dtype=dtype, left_out=left_out["rotary_write"])
    matmul = resolve_matmul_here(left_out=left_out["fused_matmul"])
    if current_platform() == "gpu" and FUSED_MATMUL[matmul].plain_xla:
        _check_whole_sums(config, model, dtype)
    moe = config.moe_backend
    if moe == "auto" and model.sparse_layers:
        experts: list[Any] = [jax.ShapeDtypeStruct((model.num_experts, D, F), dtype) for D, F, _ in _products(model)]
        moe = resolve_grouped_matmul(moe, experts, left_out["grouped_matmul"])
    if "cpu" in (attention, rotary, matmul, moe):
        library.set_num_threads(config.num_threads)
    layer = LayerKernels(moe, rotary, matmul, fuse_residuals=config.deterministic == "always")
    return KernelChoice(attention, layer, qualification, config.skip_qualification)


def decide_deterministic(model: ModelConfig, dtype: Any, config: EngineConfig) -> EngineConfig:
    """The config with deterministic="auto" decided: "always" where that costs nothing, which is where the kernels for CPUs compute
    a dense model on one device; else "bucket". Errors as those of `choose_kernels`."""
    if config.deterministic != "auto":
        return config
    always, bucket = replace(config, deterministic="always"), replace(config, deterministic="bucket")
    is_sampled = config.speculative is None or config.speculative.acceptance == "sampled"
    if current_platform() != "cpu" or config.tensor_parallel_size > 1 or model.sparse_layers or not is_sampled:
        return bucket
    return always if all(resolve_here() == "cpu" for resolve_here in _resolvers(model, dtype, always)) else bucket


def _resolvers(model: ModelConfig, dtype: Any, config: EngineConfig) -> tuple[Callable[..., str], Callable[..., str]]:
    """What decides the backends of attention and of the dense layers' matmuls. left_out: by name."""
    attention = functools.partial(
        resolve_attention,
        config.attention_backend,
        num_query_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size or DEFAULT_PAGE_SIZE,
        dtype=dtype,
    )
    weights = [(D, F, step.startswith("gate")) for D, F, step in _fused_weights(model, config)]
    return attention, functools.partial(resolve_fused_matmul, config.matmul_backend, weights, dtype)


def _check_whole_sums(config: EngineConfig, model: ModelConfig, dtype: Any) -> None:
    """NotImplementedError where several GPUs would need equal bits of XLA's matmuls, each of whose widths is another program."""
    if config.deterministic == "always" and config.tensor_parallel_size > 1:
        shapes = ", ".join(f"[{D}, {F}]" for D, F, _ in _fused_weights(model, config))
        raise NotImplementedError(
            f"deterministic='always' with tensor_parallel_size={config.tensor_parallel_size} needs matmul_backend='mosaic_sm90' on "
            f"GPUs, and it can't be had here for {jnp.dtype(dtype).name} {shapes}: use 'bucket', or one device"
        )


def _may_be_ours(attention_backend: str) -> bool:
    """Whether the attention may be a kernel of ours, beside which the rotary write may be one too."""
    return attention_backend == "auto" or not ATTENTION[attention_backend].plain_xla


def _say(qualification: Qualification, left_out: dict[str, dict[str, str]], asked: dict[str, str]) -> None:
    """One line of what is left out; a warning for what is used although it failed."""
    if any(left_out.values()):
        logger.warning("%s", qualification)
    for kernel, backend in asked.items():
        if backend in left_out[kernel]:
            why = left_out[kernel][backend]
            logger.warning("%s runs on %s as asked, of which the qualification says: %s", kernel, backend, why)


def _fused_weights(model: ModelConfig, config: EngineConfig) -> list[tuple[int, int, str]]:
    """(rows, columns, what stands around it) of each matrix of a device that is multiplied together with that: "norm", "gate" (and
    norm) or "residual", and "+bias"."""
    D, F, heads, n = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim, config.tensor_parallel_size
    dense = len(model.sparse_layers) < model.num_layers

    def step(what: str, has_bias: bool) -> str:
        return what + ("+bias" if has_bias else "")

    found = [(D, heads + 2 * model.num_kv_heads * model.head_dim, step("norm", model.qkv_bias))]
    found += [(D, 2 * F, step("gate", model.mlp_bias))] if dense else []
    if config.deterministic == "always":
        columns = -(-D // n)  # which have all rows
        found += [(heads * n, columns, step("residual", model.o_bias))]
        found += [(F * n, columns, step("residual", model.mlp_bias))] if dense else []
    return found


def _products(model: ModelConfig) -> list[tuple[int, int, bool]]:
    """(D, F, gated) of each matrix product of an expert."""
    D, F = model.hidden_size, model.moe_intermediate_size
    return [(D, 2 * F, True), (F, D, False)]
