"""What scoring costs: prompts with the log-probability of each of their tokens, against the same prompts without.

    python -m scripts.bench_score --model=tiny-small-head

Both run on one engine as requests of one output token, by turns, with no prefix cache; all programs are compiled before. The ratio
is the median of each pair's. A token's logits cost 2 * vocabulary * hidden FLOPs that a plain prompt has no need of, so that the
ratio can't pass 1 - (the head's share of the FLOPs), which is printed beside it (of matrix multiplications, attention's left out).
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from jaxserve.cli.common.bench_models import bench_model
from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.engine_flags import define_engine_flags, engine_options
from jaxserve.cli.common.provenance import provenance, write_json

_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "Prompts of a run.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 256, "Tokens of a prompt.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed pairs of runs.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")
define_engine_flags(model="tiny-small-head")


def one_token() -> Any:
    """The sampling parameters of every request."""
    from jaxserve import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def run(engine: Any, prompts: list[list[int]], score: bool) -> float:
    """Seconds for all prompts."""
    params = one_token()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        requests = engine.add_request(str(i), prompt, params, score_from=1 if score else None)
    while engine.has_unfinished_requests():
        engine.step()
    elapsed = time.perf_counter() - start
    scores = requests[0].prompt_scores
    assert (scores is not None and not np.isnan(scores.logprobs).any()) if score else scores is None
    return elapsed


def head_share(engine: Any) -> float:
    """The head's share of a token's FLOPs in matrix multiplications."""
    functions, model = engine.runner.programs.functions, engine.config.model
    head = model.vocab_size * model.hidden_size
    layers = sum(x.size for path, x in zip(functions.paths, functions.weights, strict=True) if path.startswith("layers/"))
    return head / (head + layers)


def main() -> None:
    from jaxserve import Engine
    from jaxserve.llm import engine_config

    with refuse_bad_input():
        options: dict[str, Any] = {**engine_options(), "enable_prefix_caching": False}
        engine = Engine(bench_model(flags.FLAGS.model, options["dtype"]), engine_config(options), eos_token_ids=())
        engine.check_request("longest", [0] * _LENGTH.value, one_token())
    print(engine.describe(), file=sys.stderr)
    rng = np.random.default_rng(0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(-1, _REPEATS.value):  # the first pair compiles and is not counted
        prompts = rng.integers(0, engine.config.model.vocab_size, (_PROMPTS.value, _LENGTH.value)).tolist()
        for score in (True, False) if repeat % 2 else (False, True):
            elapsed = run(engine, prompts, score)
            if repeat >= 0:
                times[score].append(elapsed)
    num_tokens = _PROMPTS.value * _LENGTH.value
    plain, scored = (num_tokens / statistics.median(times[score]) for score in (False, True))
    ratio = statistics.median(p / s for p, s in zip(times[False], times[True], strict=True))
    share = head_share(engine)
    print(
        f"{flags.FLAGS.model}: {scored:.0f} scored tok/s, {plain:.0f} plain prompt tok/s, ratio {ratio:.3f}; "
        f"the head has {100 * share:.1f}% of the FLOPs"
    )
    write_json(
        _JSON.value,
        {
            "benchmark": "score",
            "model": flags.FLAGS.model,
            "num_prompts": _PROMPTS.value,
            "length": _LENGTH.value,
            "seconds_plain": times[False],
            "seconds_scored": times[True],
            "tokens_per_second_plain": plain,
            "tokens_per_second_scored": scored,
            "ratio": ratio,
            "head_share_of_flops": share,
            **provenance(),
        },
    )


if __name__ == "__main__":
    run_command(main)
