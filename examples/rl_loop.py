"""Reinforcement learning in one process: the engine samples from the trainer's own arrays.

    python examples/rl_loop.py

A tiny model learns to answer with even token ids. Each iteration samples a group of answers to every prompt, takes the reward less
the group's mean as advantage (GRPO, arXiv:2402.03300, section 4.1), makes one Adam step, and hands the module back with
`update_params`: no copy of the weights, and nothing compiles again. `python -m scripts.rl_rollout` is a longer one that also
compares log-probabilities.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
from flax import nnx

from jaxserve import LLM, BucketPlan, SamplingParams

ITERATIONS, PROMPTS, GROUP, PROMPT_LEN, ANSWER_LEN = 20, 4, 16, 4, 4


def logprobs(module, tokens):  # i32[B, S] -> f32[B, ANSWER_LEN]
    """The trainer's log-probabilities of the answers' tokens."""
    every = jax.nn.log_softmax(module(tokens[:, :-1]))
    return jnp.take_along_axis(every, tokens[:, 1:, None], -1)[:, -ANSWER_LEN:, 0]


@nnx.jit
def train_step(module, optimizer, tokens, advantages):
    grads = nnx.grad(lambda m: -(advantages[:, None] * logprobs(m, tokens)).mean())(module)
    optimizer.update(module, grads)


def main() -> None:
    rows = PROMPTS * GROUP
    module = tiny.module()
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    plan = BucketPlan(decode=(rows,), mixed=((rows * PROMPT_LEN, rows),), head_rows=(rows,))
    llm = LLM.from_params(module, bucket_plan=plan)  # the arrays of `module`, not copies
    rng, rewards = np.random.default_rng(0), []
    for i in range(ITERATIONS):
        prompts = rng.integers(0, 250, (PROMPTS, PROMPT_LEN)).tolist()
        params = SamplingParams(n=GROUP, max_tokens=ANSWER_LEN, ignore_eos=True, seed=i)
        rollouts = llm.generate(prompts, params, use_tqdm=False)
        tokens = np.array([[*r.prompt_token_ids, *answer.token_ids] for r in rollouts for answer in r.outputs], np.int32)
        reward = (tokens[:, -ANSWER_LEN:] % 2 == 0).mean(1).reshape(PROMPTS, GROUP)
        advantages = (reward - reward.mean(1, keepdims=True)).ravel().astype(np.float32)
        train_step(module, optimizer, tokens, advantages)
        llm.update_params(module)
        rewards.append(reward.mean())
        print(f"iteration {i:2d}: reward {rewards[-1]:.2f}")
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}, {llm.engine.runner.programs.num_compiled} programs compiled")


if __name__ == "__main__":
    main()
