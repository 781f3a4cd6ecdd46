"""Training of heads that draft: they learn, go on after a kill as if nothing had been, and are what the engine reads."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, BucketPlan, SamplingParams
from jaxserve.models.loading import load_model
from jaxserve.training import draft_chains
from jaxserve.training.answer_states import Answer, make_batch
from jaxserve.training.answers import collect_answers, read_answers
from jaxserve.training.draft_trainer import DraftTrainer, TrainingConfig, frequent_tokens
from tests import alphabet_model

CONFIG = TrainingConfig(num_drafts=3, draft_vocab_size=40, steps=60, batch_size=8, length=16, learning_rate=1e-2, save_every=20)
LETTERS = alphabet_model.ids("abcdefghijklmnopqrstuvwxyz")


def answers(num: int) -> list[Answer]:
    """Of the alphabet's model."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num):
        prompt = rng.choice(LETTERS[:14], 3).tolist()
        found.append(Answer(prompt, [prompt[-1] + 1 + i for i in range(12)]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return alphabet_model.save(tmp_path_factory.mktemp("alphabet"))


@pytest.fixture(scope="module")
def target(folder):
    return load_model(folder, skip_tokenizer_init=True).module


@pytest.mark.slow
@pytest.mark.parametrize(("method", "shared_head"), [("eagle3", False), ("medusa", False), ("medusa", True)])
def test_a_head_learns_and_drafts_in_the_engine(method, shared_head, folder, target, tmp_path):
    config = replace(CONFIG, method=method, shared_head=shared_head)
    trainer, losses = DraftTrainer(target, answers(100), config, tmp_path / "checkpoints"), []
    before = trainer.evaluate(answers(120)[100:])
    trainer.train(lambda step, loss: losses.append(loss))
    after = trainer.evaluate(answers(120)[100:])
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1, "what is left is the entropy of the target's own distribution"
    assert before.accepted_length < 1.5 and after.accepted_length > 3.5
    assert after.shares == sorted(after.shares, reverse=True) and len(after.shares) == 3
    trainer.export(tmp_path / "head", "float32")
    further = replace(config, init=str(tmp_path / "head"), draft_vocab_size=30)  # the letters, and fewer others
    begun = DraftTrainer(target, answers(100), further, tmp_path / "further")
    assert begun.evaluate(answers(120)[100:]).accepted_length > 3.5, "no step was needed"
    speculative = {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": 3, "adaptive": False}
    options = {"bucket_plan": BucketPlan(mixed=((16, 4),), head_rows=(16,)), "num_pages": 64, "page_size": 4}
    llm = LLM(folder, speculative_config=speculative, compilation_cache_dir="", max_model_len=64, **options)
    (output,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=13, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].text == alphabet_model.after("a", 13)
    stats = llm.engine.stats
    assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens - 3 and stats.num_steps < 7


@pytest.mark.slow
def test_a_head_of_another_form_is_not_trained_further(target, tmp_path):
    DraftTrainer(target, answers(20), replace(CONFIG, method="medusa"), tmp_path / "of_3").export(tmp_path / "head", "float32")
    config = replace(CONFIG, method="medusa", init=str(tmp_path / "head"))
    for field, message in (
        ({"num_drafts": 2}, "as a head of medusa: the earlier head is not of the new one's form: num_heads=3 there, 2 here"),
        ({"shared_head": True}, "shared_head=False there, True here"),
        ({"method": "eagle3"}, f"init={tmp_path}/head can't be trained further as a head of eagle3: config of"),
        ({"init": str(tmp_path / "none")}, f"init={tmp_path}/none can't be|{tmp_path}/none"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            DraftTrainer(target, answers(20), replace(config, **field), tmp_path / "other")


def test_a_folder_to_begin_with_has_one_spelling():
    assert TrainingConfig(init="./heads//first/") == TrainingConfig(init="heads/first")


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_weights(target, tmp_path):
    config = replace(CONFIG, steps=12, save_every=4)
    whole = DraftTrainer(target, answers(20), config, tmp_path / "whole")
    whole.states.compute()
    whole.train()

    def die(step: int, loss: float) -> None:
        if step == 7:
            raise Killed

    with pytest.raises(Killed):
        killed = DraftTrainer(target, answers(20), config, tmp_path / "killed")
        killed.states.compute()
        killed.train(die)
    steps: list[int] = []
    again = DraftTrainer(target, answers(20), config, tmp_path / "killed")
    assert again.step == 4
    assert DraftTrainer(target, answers(20), replace(config, states_gib=0), tmp_path / "killed").step == 4
    again.train(lambda step, loss: steps.append(step))
    assert steps == [*range(5, 13)]
    for path, weight in whole.weights.items():
        np.testing.assert_array_equal(weight, again.weights[path], err_msg=path)
    assert DraftTrainer(target, answers(20), config, tmp_path / "killed").step == 12
    with pytest.raises(ValueError, match=r"has checkpoints of another run \(seed=0 there, 1 now\): give a new folder"):
        DraftTrainer(target, answers(20), replace(config, seed=1), tmp_path / "killed")
    for progress in (tmp_path / "killed").glob("*/progress.json"):
        progress.write_text(json.dumps({k: v for k, v in json.loads(progress.read_text()).items() if k != "recipe"}))
    with pytest.raises(ValueError, match=r"another run \(recipe=1 there, 2 now\)"):
        DraftTrainer(target, answers(20), config, tmp_path / "killed")


@pytest.mark.slow
def test_prompts_teach_but_for_what_all_begin_with(target, tmp_path):
    """A step's loss is that of all tokens behind the four that the prompts share, which the head knows."""
    known = [Answer([*range(4), *prompt], output) for prompt, output in answers(8)]
    config, losses = replace(CONFIG, steps=1, length=20), []
    trainer = DraftTrainer(target, known, config, tmp_path / "checkpoints")
    head, batch = trainer.head(), make_batch(known, 20)
    states = draft_chains.target_states(target, head, jnp.asarray(batch.tokens))
    of = lambda begin: float(draft_chains.loss(head, states, batch.tokens, jnp.full(8, begin), batch.ends, 3))  # noqa: E731
    expected, others = of(4), [of(2), of(3), of(5), of(7)]
    trainer.train(lambda step, loss: losses.append(loss))
    assert abs(losses[0] - expected) < 0.1 * min(abs(other - expected) for other in others)


def test_the_tokens_that_a_head_knows_are_the_most_frequent():
    some = [Answer([7], [3, 9, 9, 9]), Answer([8], [3, 5])]
    assert frequent_tokens(some, 12, 2).tolist() == [3, 9]
    assert frequent_tokens(some, 12, 5).tolist() == [0, 1, 3, 5, 9], "filled up with the lowest"
    assert len(frequent_tokens(some, 12, 100)) == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "eagle"}, "method='eagle' must be one of eagle3, medusa"),
        ({"shared_head": True}, "shared_head=True is of method='medusa', and method is 'eagle3'"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"length": 5}, r"length=5 must be at least num_drafts \+ 3 = 7"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
        ({"states_gib": -1.0}, "states_gib=-1.0 must not be negative"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**fields)


class FakeLLM(LLM):
    """Answers with the prompt turned around, until it is killed."""

    def __init__(self, most: int):
        self.left = most

    def generate(self, prompts, params, use_tqdm):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert params.temperature == 0 and params.max_tokens == 5
        self.left -= 1
        if self.left < 0:
            raise Killed
        found = [type("Sample", (), {"token_ids": prompt["prompt_token_ids"][::-1]}) for prompt in prompts]
        return [type("Output", (), {"outputs": [sample]}) for sample in found]


def test_answers_are_kept_as_they_come(tmp_path):
    path, prompts = tmp_path / "head" / "answers.jsonl", [[i, i + 1] for i in range(1200)]
    with pytest.raises(Killed):
        collect_answers(FakeLLM(1), prompts, path, 5)
    with path.open("a") as file:
        file.write('{"prompt": [6')  # the kill came while it wrote
    assert len(read_answers(path)) == 512
    done: list[int] = []
    found = collect_answers(FakeLLM(2), prompts, path, 5, done.append)
    assert done == [1024, 1200] and found == read_answers(path) == [Answer(prompt, prompt[::-1]) for prompt in prompts]
    assert json.loads(path.read_text().splitlines()[3]) == {"prompt": [3, 4], "output": [4, 3]}
    with pytest.raises(ValueError, match="has answers to other prompts, line 1 is the first: give a new folder"):
        collect_answers(FakeLLM(0), [[9]], path, 5)
