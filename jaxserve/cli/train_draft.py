r"""Trains a head that drafts for a model, on the model's own answers: EAGLE-3, or Medusa heads.

    jaxserve train-draft --model=HuggingFaceTB/SmolLM2-135M-Instruct --output=smollm2-eagle3
    jaxserve train-draft --model=MODEL --output=FOLDER --method=medusa --num_drafts=3 --prompts=prompts.jsonl
    jaxserve serve MODEL --speculative_config='{"method": "eagle3", "model": "smollm2-eagle3", "num_speculative_tokens": 4}'

The prompts are made here (questions, edits of code, rewrites of text), or read from --prompts, JSON lines {"prompt": text}.
--own_prompts adds so many that the model makes up itself (Magpie, 2406.08464): it samples what its users would say, which is far
more diverse. The model answers them all, greedily. The last --num_eval prompts are kept for the measure at the end: of the steps in
which chains of drafts would bring these answers, the share whose first draft is right, whose first two are, and so on, and the
tokens of a step.

With --shared_head Medusa heads are as vLLM has them: one block each in front of the target's head, of which they use the rows of
--draft_vocab_size tokens. They are trained several times as fast, and are small.

The target's states of all answers are computed once and kept in a file meanwhile, unless they would take more than --states_gib
(of an EAGLE-3 head for SmolLM2-135M 4.5 KiB a token). A step does not run the target then.

--output becomes what the method's authors publish, config.json and model.safetensors. `own_prompts.jsonl`, `answers.jsonl` and
`checkpoints/` beside them are what a run that was killed goes on from, with the same command; the weights are then those of a run
that was not. They may be deleted afterwards.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.cli.common.provenance import provenance, write_json

_MODEL = flags.DEFINE_string(
    "model", None, "The target: a Hugging Face folder or id, a GGUF file or an Orbax folder.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "The folder of the head, its answers and its checkpoints.", required=True)
_METHOD = flags.DEFINE_enum("method", "eagle3", ["eagle3", "medusa"], "What is trained.")
_PROMPTS = flags.DEFINE_string("prompts", None, 'A file of prompts, {"prompt": text} a line; otherwise they are made.')
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 2000, "Prompts that are made, 5,000 at most; of a file the first so many.", lower_bound=2
)
_OWN_PROMPTS = flags.DEFINE_integer("own_prompts", 0, "Prompts beside them that the model makes up itself.", lower_bound=0)
_NUM_EVAL = flags.DEFINE_integer("num_eval", 48, "Of these, the last ones, that are not trained on.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most tokens of an answer.", lower_bound=2)
_DRAFTS = flags.DEFINE_integer("num_drafts", 4, "Drafts of a chain; of Medusa its heads.", lower_bound=1)
_SHARED = flags.DEFINE_bool("shared_head", False, "Of Medusa: blocks alone are trained, in front of the target's own head.")
_INIT = flags.DEFINE_string("init", None, "The folder of a head of the same form that is trained further; otherwise a new one.")
_VOCAB = flags.DEFINE_integer("draft_vocab_size", 8192, "Tokens that an EAGLE-3 head, or a shared head, knows.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 600, "Steps of the optimizer.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 4, "Sequences of a step.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 224, "Tokens of a sequence, prompt and answer; what is longer is cut.", lower_bound=8)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Of Adam, after a warm-up; it falls to 0 by a cosine.")
_SAVE = flags.DEFINE_integer("save_every", 50, "Steps between checkpoints.", lower_bound=1)
_STATES = flags.DEFINE_float(
    "states_gib", 16.0, "Most GiB that the target's states of all answers may take on the disk; else each step computes its own."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the prompts, the first weights and the order.", lower_bound=0)
_DTYPE = flags.DEFINE_string("dtype", "auto", "Of the target, and of the head's file; auto: the model's own.")
_JSON = flags.DEFINE_string("json", None, "Write the result to this file; - is stdout.")

MOST_OWN_TOKENS = 64  # of a prompt that the model makes up


def collect() -> list[Any]:
    """The target's answers to all prompts, from the file or new."""
    from tqdm import tqdm

    from jaxserve import LLM
    from jaxserve.models.files import find_model
    from jaxserve.training.answers import collect_answers, read_answers
    from jaxserve.training.draft_trainer import find_head
    from jaxserve.training.prompts import make_prompts, read_prompts

    texts = make_prompts(_NUM_PROMPTS.value, _SEED.value) if _PROMPTS.value is None else read_prompts(_PROMPTS.value)
    texts = texts[: _NUM_PROMPTS.value]
    if _INIT.value is not None:  # before anything is computed: it is read when it is trained
        find_head(_INIT.value, _METHOD.value, find_model(_MODEL.value).config)
    llm = LLM(_MODEL.value, dtype=_DTYPE.value, max_model_len=_LENGTH.value + _MAX_TOKENS.value, max_num_seqs=128)
    if _OWN_PROMPTS.value:
        texts = list(dict.fromkeys([*texts, *make_up_prompts(llm)]))
        random.Random(_SEED.value).shuffle(texts)  # the last ones, kept for the measure, are of all kinds
    if len(texts) <= _NUM_EVAL.value:
        raise app.UsageError(f"--num_eval={_NUM_EVAL.value} leaves nothing of {len(texts)} prompts to train on: lower it")
    kept = Path(_OUTPUT.value) / "answers.jsonl"
    chats = [[{"role": "user", "content": text}] for text in texts]
    asked: list[Any] = llm.chat_prompts(chats)
    prompts = [list(prompt["prompt_token_ids"]) for prompt in asked]
    with tqdm(desc="answers", total=len(prompts), initial=len(read_answers(kept))) as bar:

        def report(num: int) -> None:
            bar.update(num - bar.n)

        return collect_answers(llm, prompts, kept, _MAX_TOKENS.value, report)


def make_up_prompts(llm: Any) -> list[str]:
    """The prompts that the model makes up, from the file or new."""
    from tqdm import tqdm

    from jaxserve.training.own_prompts import collect_own_prompts

    kept = Path(_OUTPUT.value) / "own_prompts.jsonl"
    with tqdm(desc="own prompts", total=_OWN_PROMPTS.value) as bar:

        def report(num: int) -> None:
            bar.update(num - bar.n)

        most = min(MOST_OWN_TOKENS, _LENGTH.value // 2)
        return collect_own_prompts(llm, _OWN_PROMPTS.value, kept, max_tokens=most, seed=_SEED.value, report=report)


def train(answers: list[Any]) -> dict[str, Any]:
    """Trains, measures and writes the head; what came out."""
    from tqdm import tqdm

    from jaxserve.models.loading import load_model
    from jaxserve.training.draft_trainer import DraftTrainer, TrainingConfig

    names = (
        "method",
        "num_drafts",
        "shared_head",
        "draft_vocab_size",
        "steps",
        "batch_size",
        "length",
        "learning_rate",
        "save_every",
        "seed",
        "states_gib",
        "init",
    )
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    config = TrainingConfig(**given)
    target = load_model(_MODEL.value, dtype=_DTYPE.value, skip_tokenizer_init=True).module
    if config.method == "medusa" and not config.shared_head and flags.FLAGS["draft_vocab_size"].present:
        raise app.UsageError("--draft_vocab_size is of EAGLE-3, and of Medusa with --shared_head: leave it out")
    known, held = answers[: -_NUM_EVAL.value], answers[-_NUM_EVAL.value :]
    trainer = DraftTrainer(target, known, config, Path(_OUTPUT.value) / "checkpoints")
    begun, losses = time.monotonic(), []
    if trainer.step < config.steps:
        with tqdm(desc="states", total=len(trainer.answers)) as bar:

            def so_many(num: int) -> None:
                bar.update(num - bar.n)

            trainer.states.compute(so_many)
    with tqdm(desc="steps", total=config.steps, initial=trainer.step) as bar:

        def report(step: int, loss: float) -> None:
            losses.append(loss)
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update(step - bar.n)

        trainer.train(report)
    trainer.states.delete()
    worth = trainer.evaluate(held)
    trainer.export(_OUTPUT.value, target.final_norm.scale[...].dtype)
    shown = {"loss_at_first": losses[0], "loss_at_last": losses[-1]} if losses else {}
    seconds = {"steps_run": len(losses), "training_seconds": time.monotonic() - begun}
    return {**shown, **seconds, "shares_right": worth.shares, "accepted_length": worth.accepted_length}


def main() -> None:
    with refuse_bad_input():
        result = train(collect())
    shares = ", ".join(f"{100 * share:.0f}%" for share in result["shares_right"])
    print(f"{_OUTPUT.value}: of steps along answers kept aside {shares} have their first drafts right, one, two and so on;")
    print(f"{result['accepted_length']:.2f} tokens a step; {result['steps_run']} steps in {result['training_seconds']:.0f} s")
    if _JSON.value:
        about = {"benchmark": "train_draft", "model": _MODEL.value, "method": _METHOD.value}
        write_json(_JSON.value, {**about, **provenance(), **result})


if __name__ == "__main__":
    run_command(main)
