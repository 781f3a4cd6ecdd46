"""Attention of other libraries on the same card, in the same run: what a figure of ours is to be read beside.

cuDNN through jax.nn; torch's SDPA and its flash backend; FlexAttention where it compiles. All of them on contiguous KV, which is
less work than pages. Each is what a user gets from the library's public call.
"""

from __future__ import annotations

import functools
from typing import Any

from scripts.gpu.figures import Figures

HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128)}
DECODES = [(32, 4096), (128, 4096), (32, 16384), (8, 32768)]
PREFILLS = [2048, 8192, 16384]
_L2 = 256 << 20  # bytes of KV a timed loop goes through before it comes back: five times an H100's L2


def _points(dry_run: bool) -> tuple[dict[str, tuple[int, int, int]], list[tuple[int, int]], list[int]]:
    return ({"0.6b": (4, 2, 64)}, [(2, 64)], [64]) if dry_run else (HEADS, DECODES, PREFILLS)


def prefill_flops(N: int, S: int, H: int) -> int:
    return 4 * N * H * S * (S + 1) // 2


def kv_bytes(B: int, S: int, K: int, H: int) -> int:
    return B * S * 2 * K * H * 2


# ---- cuDNN, through jax


def cudnn(figures: Figures) -> None:
    """jax.nn.dot_product_attention(implementation="cudnn"); XLA's own in a dry run."""
    from scripts.gpu.device_rates import measure

    rates = measure(figures)
    heads, decodes, prefills = _points(figures.dry_run)
    for name, shape in heads.items():
        for S in prefills:
            figures.attempt(f"cudnn prefill {name} {S}", _cudnn_prefill, figures, rates, name, shape, S)
        for B, S in decodes:
            figures.attempt(f"cudnn decode {name} B={B} KV={S}", _cudnn_decode, figures, rates, name, shape, B, S)


def _jax_normal(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16))()


def _cudnn_prefill(figures: Figures, rates: Any, name: str, heads: tuple[int, int, int], S: int) -> None:
    import jax

    N, K, H = heads
    q, k, v = _jax_normal(1, S, N, H), _jax_normal(1, S, K, H), _jax_normal(1, S, K, H)
    which = "xla" if figures.dry_run else "cudnn"
    run = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=which))
    seconds = figures.seconds_per_call(lambda i: run(q, k, v), jax.block_until_ready)
    rate = prefill_flops(N, S, H) / seconds
    figures.record(f"cudnn prefill {name} {S}", rate / 1e12, "TFLOP/s", us=seconds * 1e6, percent=100 * rate / rates.matmul)


def _cudnn_decode(figures: Figures, rates: Any, name: str, heads: tuple[int, int, int], B: int, S: int) -> None:
    import jax

    N, K, H = heads
    sets = 1 if figures.dry_run else max(1, _L2 // kv_bytes(B, S, K, H))
    q = _jax_normal(B, 1, N, H)
    pairs = [(_jax_normal(B, S, K, H), _jax_normal(B, S, K, H)) for _ in range(sets)]
    run = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="xla" if figures.dry_run else "cudnn"))
    seconds = figures.seconds_per_call(lambda i: run(q, *pairs[i % sets]), jax.block_until_ready)
    share = kv_bytes(B, S, K, H) / seconds / rates.copy
    figures.record(f"cudnn decode {name} B={B} KV={S}", 100 * share, "% of copy bandwidth", us=seconds * 1e6)


# ---- torch


def import_torch() -> Any:
    """torch; NotImplementedError where there is none."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotImplementedError("torch is not installed for this Python; name another with --torch_python") from error
    return torch


def torch_attention(figures: Figures) -> None:
    """SDPA as it picks its kernel, its flash backend alone, and FlexAttention; in a process that never imports jax."""
    torch = import_torch()

    gpu = torch.cuda.is_available()
    if not gpu and not figures.dry_run:
        raise NotImplementedError("torch sees no GPU")
    device = "cuda" if gpu else "cpu"
    figures.record("version torch", torch.__version__, device=torch.cuda.get_device_name() if gpu else "cpu")
    copy, matmul = _torch_rates(figures, torch, device)
    heads, decodes, prefills = _points(figures.dry_run)
    for name, (N, K, H) in heads.items():
        for kind, run in _torch_kinds(torch, gpu).items():
            for S in prefills:
                q, k, v = (torch.randn(1, n, S, H, device=device, dtype=torch.bfloat16) for n in (N, K, K))
                title = f"{kind} prefill {name} {S}"
                seconds = figures.attempt(title, _torch_seconds, figures, torch, gpu, lambda i, a=(q, k, v), r=run: r(*a, True))
                if seconds:
                    rate = prefill_flops(N, S, H) / seconds
                    figures.record(title, rate / 1e12, "TFLOP/s", us=seconds * 1e6, percent=100 * rate / matmul)
            for B, S in decodes:
                sets = max(1, _L2 // kv_bytes(B, S, K, H)) if gpu else 1
                q = torch.randn(B, N, 1, H, device=device, dtype=torch.bfloat16)
                pairs = [torch.randn(2, B, K, S, H, device=device, dtype=torch.bfloat16) for _ in range(sets)]
                call = lambda i, q=q, pairs=pairs, r=run: r(q, *pairs[i % len(pairs)], False)  # noqa: E731
                title = f"{kind} decode {name} B={B} KV={S}"
                seconds = figures.attempt(title, _torch_seconds, figures, torch, gpu, call)
                if seconds:
                    share = kv_bytes(B, S, K, H) / seconds / copy
                    figures.record(title, 100 * share, "% of copy bandwidth", us=seconds * 1e6)
                del q, pairs, call


def _torch_kinds(torch: Any, gpu: bool) -> dict[str, Any]:
    """name -> run(q, k, v, causal) of each of torch's attentions."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

    compiled = torch.compile(flex_attention) if gpu else flex_attention

    @functools.cache
    def causal_mask(S: int) -> Any:
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cuda" if gpu else "cpu")

    def sdpa(q, k, v, causal):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def flash(q, k, v, causal):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def flex(q, k, v, causal):
        return compiled(q, k, v, block_mask=causal_mask(q.shape[2]) if causal else None, enable_gqa=True)

    return {"torch sdpa": sdpa, "torch flash": flash, "torch flex": flex}


def _torch_seconds(figures: Figures, torch: Any, gpu: bool, call: Any) -> float:
    with torch.no_grad():
        return figures.seconds_per_call(call, (lambda _: torch.cuda.synchronize()) if gpu else (lambda _: None))


def _torch_rates(figures: Figures, torch: Any, device: str) -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a matmul) through torch."""
    n, side = (1 << 14, 128) if figures.dry_run else (1 << 29, 8192)
    gpu = device == "cuda"
    x = torch.randn(n, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = 4 * n / _torch_seconds(figures, torch, gpu, lambda i: y.copy_(x))
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    matmul = 2 * side**3 / _torch_seconds(figures, torch, gpu, lambda i: a @ b)
    figures.record("torch copy bandwidth", copy / 1e9, "GB/s")
    figures.record("torch matmul rate", matmul / 1e12, "TFLOP/s")
    return copy, matmul


# ---- transformers


def transformers_generate(figures: Figures) -> None:
    """The requests of `nano_vllm` through transformers, random weights: static batches of `generate`, then continuous batching.
    Neither figure has the first call's warm-up in it."""
    torch = import_torch()

    import transformers  # pyright: ignore[reportMissingImports]

    from jaxserve.workloads.workload import nano_vllm
    from scripts.bench.torch_model import make_model
    from scripts.bench_transformers import make_batches, run

    gpu = torch.cuda.is_available()
    if not gpu and not figures.dry_run:
        raise NotImplementedError("torch sees no GPU")
    requests = [(8, 4)] * 4 if figures.dry_run else nano_vllm().lengths
    model = make_model("tiny-qwen3" if figures.dry_run else "qwen3-0.6b", "auto").to("cuda" if gpu else "cpu")
    figures.record("version torch", torch.__version__)
    figures.record("version transformers", transformers.__version__)

    def static() -> None:
        part = requests[: len(requests) // 4]  # a quarter of them: generate takes minutes for all

        def timed(requests: list[tuple[int, int]]) -> dict[str, float]:
            batches = make_batches(requests, 64, model.config.vocab_size)
            batches = [(tokens.to(model.device), mask.to(model.device), n) for tokens, mask, n in batches]
            return run(model, batches, sum(n for _, n in requests))

        timed([(8, 4)] * 64)
        done = timed(part)
        figures.record(
            "transformers generate",
            done["output_tokens_per_second"],
            "output tok/s",
            batch=64,
            requests=len(part),
            seconds=done["elapsed_time"],
        )

    def continuous() -> None:
        import time

        import numpy as np
        from transformers import GenerationConfig  # pyright: ignore[reportMissingImports]

        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n, _ in requests]
        longest = sum(n for _, n in requests) // len(requests)  # one length for all: it takes no length a request
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
        start = time.perf_counter()
        results = model.generate_batch(inputs=prompts, generation_config=config).values()
        whole = time.perf_counter() - start
        made = sum(len(result.generated_tokens) for result in results)
        if made != longest * len(prompts):
            raise RuntimeError(f"{len(results)} of {len(prompts)} requests came back, with {made} tokens of {longest} each")
        seconds = max(result.lifespan[1] for result in results) - min(result.created_time for result in results)
        about = {"requests": len(prompts), "seconds": seconds, "seconds_with_warm_up": whole}
        figures.record("transformers continuous batching", made / seconds, "output tok/s", **about)

    figures.attempt("transformers generate", static)
    figures.attempt("transformers continuous batching", continuous)
