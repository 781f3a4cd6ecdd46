"""Reinforcement learning in one process: optax trains a Flax module, and the engine samples from the same arrays.

    python -m scripts.rl_rollout
    python -m scripts.rl_rollout --iterations=20 --dtype=bfloat16 --json=-

A tiny decoder with random weights learns to answer in tokens of its prompt's kind: a prompt is noise and a kind, an answer's reward
is the share of its tokens t with t % 4 == kind (a quarter by chance). Each iteration samples a group of answers to every prompt,
takes the reward less the group's mean over its deviation as advantage (GRPO, arXiv:2402.03300, section 4.1; one update a rollout,
so that its ratios are 1), makes one Adam step, and hands the module back with `LLM.update_params`: no copy, nothing compiled.

It reports how far the engine's log-probabilities of the tokens it sampled are from the trainer's of the same: in each iteration,
and at the end for engines in float32 and in bfloat16, against a trainer in the engine's dtype (what the order of sums makes: padded
buckets and paged attention against one [B, S] forward) and in float32 (and what rounding weights and activations adds). --dtype is
the engine's in the loop; training is in float32.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.common.command import run_command
from jaxserve.cli.common.engine_flags import define_layout_flags, layout_options
from jaxserve.cli.common.provenance import provenance, write_json

_ITERATIONS = flags.DEFINE_integer("iterations", 40, "Rollouts, each with one update.", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "Prompts an iteration.", lower_bound=1)
_GROUP = flags.DEFINE_integer("group", 16, "Answers to each prompt.", lower_bound=2)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 6, "Tokens of an answer.", lower_bound=1, upper_bound=48)
_RATE = flags.DEFINE_float("learning_rate", 5e-3, "Of Adam.", lower_bound=0.0)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the engine.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights, the prompts and the sampling.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_layout_flags()

KINDS, PROMPT_LEN = 4, 8
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def plan() -> Any:
    """All answers of an iteration at once: their prompts in one step, then a token each a step."""
    from jaxserve import BucketPlan

    n = _PROMPTS.value * _GROUP.value
    return BucketPlan(decode=(n,), mixed=((n * PROMPT_LEN, n),), head_rows=(n,))


def draw_prompts(rng: np.random.Generator, n: int) -> np.ndarray:  # i32[n, PROMPT_LEN]
    """Noise, then the kind, as a token below KINDS."""
    prompts = rng.integers(KINDS, MODEL["vocab_size"], (n, PROMPT_LEN))
    prompts[:, -1] = rng.integers(0, KINDS, n)
    return prompts


def rewards_of(tokens: np.ndarray) -> np.ndarray:
    """f64[B]: the share of each answer's tokens that are of its prompt's kind. tokens: i32[B, PROMPT_LEN + answer]."""
    return (tokens[:, PROMPT_LEN:] % KINDS == tokens[:, PROMPT_LEN - 1 : PROMPT_LEN]).mean(1)


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """f32[B]: each reward against its group, in the order of the groups."""
    groups = rewards.reshape(-1, _GROUP.value)
    centred = groups - groups.mean(1, keepdims=True)
    return (centred / (groups.std(1, keepdims=True) + 1e-4)).ravel().astype(np.float32)


def sample(llm: Any, prompts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A group of answers to each prompt: tokens i32[B, PROMPT_LEN + answer], log-probabilities of the answers f64[B, answer]."""
    from jaxserve import SamplingParams

    params = SamplingParams(n=_GROUP.value, max_tokens=_MAX_TOKENS.value, ignore_eos=True, logprobs=0, seed=seed)
    outputs = llm.generate([p.tolist() for p in prompts], params, use_tqdm=False)
    tokens, logprobs = [], []
    for output in outputs:
        for answer in output.outputs:
            tokens.append([*output.prompt_token_ids, *answer.token_ids])
            logprobs.append([step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True)])
    return np.array(tokens, np.int32), np.array(logprobs)


def make_trainer(model: Any) -> tuple[Any, Any]:
    """(update(tokens, advantages): one Adam step on `model`, logprobs(module, tokens) f32[B, answer]: of the answers' tokens)."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    optimizer = nnx.Optimizer(model, optax.adam(_RATE.value), wrt=nnx.Param)

    def logprobs(module, tokens):
        every = jax.nn.log_softmax(module(tokens[:, :-1]))
        return jnp.take_along_axis(every, tokens[:, 1:, None], -1)[:, PROMPT_LEN - 1 :, 0]

    @nnx.jit
    def step(module, optimizer, tokens, advantages):
        grads = nnx.grad(lambda m: -(advantages[:, None] * logprobs(m, tokens)).mean())(module)
        optimizer.update(module, grads)

    return lambda tokens, advantages: step(model, optimizer, tokens, advantages), nnx.jit(logprobs)


def train(llm: Any, model: Any, update: Any, logprobs: Any) -> list[dict[str, float]]:
    """The loop; returns a record an iteration."""
    rng, records = np.random.default_rng(_SEED.value), []
    for i in range(_ITERATIONS.value):
        start = time.perf_counter()
        tokens, sampled_logprobs = sample(llm, draw_prompts(rng, _PROMPTS.value), seed=int(rng.integers(2**31)))
        sampled = time.perf_counter()
        apart = np.abs(np.asarray(logprobs(model, tokens), np.float64) - sampled_logprobs)
        rewards = rewards_of(tokens)
        update(tokens, advantages_of(rewards))
        llm.update_params(model)
        seconds = {"rollout_seconds": sampled - start, "update_seconds": time.perf_counter() - sampled}
        records.append({"reward": rewards.mean(), "mean_difference": apart.mean(), "max_difference": apart.max(), **seconds})
        print(f"iteration {i:3d}: reward {rewards.mean():.3f}, log-probabilities within {apart.max():.1e}", file=sys.stderr)
    return records


def differences(model: Any, logprobs: Any) -> list[dict[str, Any]]:
    """For engines in both dtypes: how far their log-probabilities are from the module's, in their own dtype and in float32."""
    import jax.numpy as jnp

    from jaxserve import LLM
    from jaxserve.models import Decoder, named_leaves, with_leaves

    prompts, rows = draw_prompts(np.random.default_rng(_SEED.value + 1), _PROMPTS.value), []
    for dtype in ("float32", "bfloat16"):
        tokens, sampled = sample(LLM.from_params(model, dtype=dtype, bucket_plan=plan(), **layout_options()), prompts, seed=1)
        for trainer_dtype in dict.fromkeys((dtype, "float32")):
            leaves = {path: x.astype(jnp.dtype(trainer_dtype)) for path, x in named_leaves(model).items()}
            trainer = with_leaves(Decoder.abstract(model.config, trainer_dtype), leaves)
            apart = np.abs(np.asarray(logprobs(trainer, tokens), np.float64) - sampled)
            same = trainer_dtype == dtype
            cause = "order of sums" + ("" if same else f", and rounding to {dtype}")
            row = {"engine": dtype, "trainer": trainer_dtype, "mean": apart.mean(), "max": apart.max(), "cause": cause}
            rows.append(row | {"num_tokens": apart.size})
    return rows


def main() -> None:
    from jaxserve import LLM
    from jaxserve.models import named_leaves
    from jaxserve.models.loading import random_model

    model = random_model(MODEL, dtype="float32", seed=_SEED.value)
    llm = LLM.from_params(model, dtype=_DTYPE.value, seed=_SEED.value, bucket_plan=plan(), **layout_options())
    update, logprobs = make_trainer(model)
    records = train(llm, model, update, logprobs)
    shared = {id(x) for x in llm.engine.runner.programs.functions.weights} <= {id(x) for x in named_leaves(model).values()}
    rows = differences(model, logprobs)
    rewards = [r["reward"] for r in records]
    for row in rows:
        print(
            f"log-probabilities of {row['num_tokens']} sampled tokens, engine {row['engine']}, trainer {row['trainer']}: "
            f"mean {row['mean']:.1e}, max {row['max']:.1e} apart ({row['cause']})"
        )
    print(
        f"reward {rewards[0]:.3f} -> {np.mean(rewards[-5:]):.3f} (last 5 of {len(rewards)} iterations), "
        f"weights {'shared' if shared else 'converted'}, {sum(r['rollout_seconds'] + r['update_seconds'] for r in records):.1f} s"
    )
    result = {"example": "rl_rollout", "dtype": _DTYPE.value, "shared_weights": shared}
    write_json(_JSON.value, {**result, "iterations": records, "differences": rows, **provenance()})


if __name__ == "__main__":
    run_command(main)
