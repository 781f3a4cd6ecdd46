"""Is a model served right? The model and the engine against transformers on the same weights and prompts.

    jaxserve verify --model=Qwen/Qwen3-0.6B          where torch is: pip install 'jaxserve[verify]'
    jaxserve verify --model=FOLDER --save_reference=answers.npz      there, and where no torch is:
    jaxserve verify --model=FOLDER --reference=answers.npz

Three questions, so that a fault has an address: do the logits of the plain forward agree with transformers' at every position of
the prompts; are the log-probabilities of the engine's tokens (chunks, pages, batches) those of the plain forward; and are its
greedy tokens transformers', but for near ties. Exits with 1 if one of them is answered no. In float32, the default, agreement is
close; in bfloat16 both sides round, and only gross faults show.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.provenance import provenance, write_json
from jaxserve.lazy_names import Late

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # --help needs none

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or id, or a GGUF file.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and activations, on both sides.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; by default four of its own.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 32, "Greedy tokens of each prompt.", lower_bound=1)
_PEER = flags.DEFINE_string("peer", None, "A Python with torch and transformers; by default this one, else .venv-torch's.")
_REFERENCE = flags.DEFINE_string("reference", None, "transformers' answers, saved before: no torch is needed.")
_SAVE = flags.DEFINE_string("save_reference", None, "Keep transformers' answers in this .npz file.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

# Of the logits' own spread: root mean square of their differences, and the largest difference of an engine's log-probability.
LOGITS_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village at the edge of a forest, there lived a clockmaker who",
    "Translate to German: The quick brown fox jumps over the lazy dog. " * 6,
)


@dataclass(frozen=True)
class Answers:
    """What one side says to the prompts; S: a prompt's tokens. gaps is transformers' alone, the logprobs of greedy tokens ours."""

    prompts: list[np.ndarray]  # i32[S] each
    logits: list[np.ndarray]  # f32[S, V] each
    greedy: np.ndarray  # i32[P, max_tokens]
    gaps: np.ndarray | None = None  # f32[P, max_tokens]
    engine_logprobs: np.ndarray | None = None  # f64[P, max_tokens]
    plain_logprobs: np.ndarray | None = None  # f64[P, max_tokens]


def read_reference(path: str | Path) -> Answers:
    """A file that --save_reference wrote. ValueError if it is none."""
    try:
        with np.load(path) as file:
            ends = np.cumsum(file["prompt_lens"])[:-1]
            prompts, logits = np.split(file["prompts"], ends), np.split(file["logits"], ends)
            return Answers(prompts, logits, file["greedy"], gaps=file["gaps"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a file that --save_reference wrote: {error}") from None


def find_peer() -> str:
    """A Python with torch and transformers. FileNotFoundError says how to get one."""
    if _PEER.value:
        return _PEER.value
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return sys.executable
    if Path(".venv-torch/bin/python").exists():
        return ".venv-torch/bin/python"
    raise FileNotFoundError(
        "torch and transformers are not installed here: pip install 'jaxserve[verify]', or give --peer, a Python that has them "
        "(in a checkout `make setup-torch` makes one)"
    )


def ask_peer(path: Path, prompts: list[list[int]], out: str) -> Answers:
    """transformers' answers, computed by a process of the peer's and written to `out`."""
    peer = find_peer()
    asked = {"model": str(path), "dtype": _DTYPE.value, "prompts": prompts, "max_tokens": _MAX_TOKENS.value, "out": out}
    program = Path(__file__).with_name("transformers_answers.py")
    done = subprocess.run([peer, "-P", str(program)], input=json.dumps(asked), text=True, stdout=sys.stderr)
    if done.returncode:
        raise app.UsageError(f"transformers failed (exit code {done.returncode}); what it said stands above")
    return read_reference(out)


def make_prompts(path: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of the flags' prompts or PROMPTS; random ones for a model without a tokenizer."""
    from jaxserve.text.tokenizer import Tokenizer

    try:
        encode = Tokenizer.from_id(path).encode
    except ValueError:
        if _PROMPT.value:
            raise
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocab_size, n).tolist() for n in (1, 7, 20, 60)]
    return [encode(text) for text in _PROMPT.value or PROMPTS]


def our_answers(loaded: Any, prompts: list[np.ndarray], max_tokens: int) -> Answers:
    """The plain forward's logits and the engine's greedy tokens, all prompts together in steps that cut and mix them."""
    import jax
    from flax import nnx

    from jaxserve import BucketPlan, Engine, EngineConfig, SamplingParams

    longest = max(map(len, prompts)) + max_tokens
    seqs = -(-len(prompts) // 8) * 8
    budget = max(-(-longest // 16) * 8, seqs)  # about half of the longest: it is cut, and mixed with others' decodes
    plan = BucketPlan(decode=(seqs,), mixed=((budget, seqs),), head_rows=(seqs,))
    config = EngineConfig(bucket_plan=plan, max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=longest)
    engine = Engine(loaded.module, config, eos_token_ids=())
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    logprobs: dict[str, list[float]] = {name: [] for name in tokens}
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.add_request(name, prompt.tolist(), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            name = output.request.request_id
            tokens[name] += output.new_token_ids
            new = zip(output.new_token_ids, output.logprobs or (), strict=True)
            logprobs[name] += [entry[token].logprob for token, entry in new]

    forward = nnx.jit(lambda model, ids: model(ids))
    logits, plain = [], []
    for prompt, answer in zip(prompts, tokens.values(), strict=True):
        padded = np.zeros((1, longest), np.int32)  # causal: what stands behind changes nothing
        padded[0, : len(prompt) + max_tokens] = [*prompt, *answer]
        whole = forward(loaded.module, padded)[0]
        logits.append(np.asarray(whole[: len(prompt)]))
        after = np.asarray(whole[len(prompt) - 1 : len(prompt) + max_tokens - 1], np.float64)
        plain.append(log_softmax(after)[np.arange(max_tokens), answer])
        jax.block_until_ready(whole)
    greedy = np.array(list(tokens.values()), np.int32)
    return Answers(prompts, logits, greedy, engine_logprobs=np.array(list(logprobs.values())), plain_logprobs=np.array(plain))


def log_softmax(logits: np.ndarray) -> np.ndarray:  # [..., V]
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def compare(ours: Answers, theirs: Answers, dtype: str) -> dict[str, Any]:
    """The differences, and "faults": a sentence for each question that is answered no."""
    difference = np.concatenate([a - b for a, b in zip(ours.logits, theirs.logits, strict=True)])
    spread = float(np.concatenate(theirs.logits).std())
    rms, largest = float(np.sqrt(np.mean(difference**2))), float(np.abs(difference).max())
    prompt_logprobs = [
        np.abs(log_softmax(a) - log_softmax(b))[np.arange(len(p) - 1), p[1:]].max(initial=0)
        for a, b, p in zip((x[:-1] for x in ours.logits), (x[:-1] for x in theirs.logits), ours.prompts, strict=True)
    ]
    assert ours.engine_logprobs is not None and ours.plain_logprobs is not None and theirs.gaps is not None
    engine = float(np.abs(ours.engine_logprobs - ours.plain_logprobs).max())

    parted = []
    for i, (a, b) in enumerate(zip(ours.greedy, theirs.greedy, strict=True)):
        at = np.nonzero(a != b)[0]
        if len(at):
            parted.append({"prompt": i, "token": int(at[0]), "gap": float(theirs.gaps[i, at[0]])})
    # Logits that differ by no more than half of this can only turn a lead as small; differences that are faults excuse nothing.
    tie = 2 * min(max(largest, engine), LOGPROB_TOLERANCE[dtype] * spread)
    faults = []
    if not rms <= LOGITS_TOLERANCE[dtype] * spread:
        faults.append(f"the model: logits differ by {rms:.2e} (rms) of a spread of {spread:.2f}")
    if not engine <= LOGPROB_TOLERANCE[dtype] * spread:
        faults.append(f"the engine: a log-probability differs from the plain forward's by {engine:.2e}")
    faults += [
        f"prompt {p['prompt']}: greedy token {p['token']} differs, where transformers' best is {p['gap']:.2e} ahead"
        for p in parted
        if not p["gap"] <= tie
    ]
    return {
        "num_prompts": len(ours.prompts),
        "logits_spread": spread,
        "logits_rms_difference": rms,
        "logits_max_difference": largest,
        "prompt_logprobs_max_difference": float(max(prompt_logprobs)),
        "engine_logprobs_max_difference": engine,
        "num_greedy_tokens": int(theirs.greedy.size),
        "smallest_gap": float(theirs.gaps.min()),
        "parted": parted,
        "faults": faults,
    }


def verify() -> dict[str, Any]:
    from checkpoints.huggingface import resolve
    from jaxserve.models.loading import load_model

    path = resolve(_MODEL.value)
    loaded = load_model(path, dtype=_DTYPE.value, skip_tokenizer_init=True, transposed=None)  # as LLM does
    if _REFERENCE.value:
        theirs = read_reference(_REFERENCE.value)
    else:
        prompts = make_prompts(path, loaded.config.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            theirs = ask_peer(path, prompts, _SAVE.value or f"{folder}/answers.npz")
    vocab_size = theirs.logits[0].shape[1]
    if vocab_size != loaded.config.vocab_size:
        raise ValueError(f"the reference has a vocabulary of {vocab_size}, {_MODEL.value} one of {loaded.config.vocab_size}")
    return compare(our_answers(loaded, theirs.prompts, theirs.greedy.shape[1]), theirs, _DTYPE.value)


def main() -> None:
    unread = [f"--{name}" for name in ("prompt", "max_tokens", "peer", "save_reference") if flags.FLAGS[name].present]
    if _REFERENCE.value and unread:
        raise app.UsageError(f"--reference brings its own prompts and transformers' answers: leave out {', '.join(unread)}")
    with refuse_bad_input():
        result = verify()
    text = sys.stderr if _JSON.value == "-" else sys.stdout
    print(
        f"{_MODEL.value}, {_DTYPE.value}, {result['num_prompts']} prompts: "
        f"logits differ by {result['logits_max_difference']:.2e} at most "
        f"(rms {result['logits_rms_difference']:.2e}, spread {result['logits_spread']:.2f}), prompt log-probabilities by "
        f"{result['prompt_logprobs_max_difference']:.2e}, the engine's from the plain forward's by "
        f"{result['engine_logprobs_max_difference']:.2e}; greedy: {result['num_greedy_tokens']} tokens, smallest lead "
        f"{result['smallest_gap']:.2e}, {len(result['parted'])} prompts part",
        file=text,
    )
    for fault in result["faults"]:
        print(f"FAULT: {fault}", file=text)
    print("FAULTY" if result["faults"] else "agrees with transformers", file=text)
    write_json(_JSON.value, {"benchmark": "verify_model", "model": _MODEL.value, "dtype": _DTYPE.value, **result, **provenance()})
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    run_command(main)
