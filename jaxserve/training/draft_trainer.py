"""Trains a head that drafts for a target on the target's own answers, and writes it as its authors publish theirs.

Owns the optimizer, the checkpoints from which a run that was killed goes on, and the measure of what a head
is worth. A step depends on the seed, its number and the state before it alone, so that a resumed run gives the same weights.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models import Decoder, ModelConfig, named_leaves, with_leaves
from jaxserve.models.eagle import EagleFiles, EagleHead, find_eagle, load_eagle
from jaxserve.models.eagle import key_table as eagle_keys
from jaxserve.models.hf_keys import tensors_of
from jaxserve.models.medusa import MedusaFiles, find_medusa, load_medusa
from jaxserve.models.medusa import key_table as medusa_keys
from jaxserve.simulation.draft_trees import chain
from jaxserve.training import draft_chains
from jaxserve.training.answer_states import Answer, AnswerStates, Batch, make_batch, shuffled_batches, usable
from jaxserve.training.draft_chains import Head
from jaxserve.training.mixed_precision import MIXED

METHODS = ("eagle3", "medusa")
MAX_NORM = 1.0  # of the gradient
WARM_UP = 0.05  # of the steps
PROGRESS = "progress.json"
RECIPE = 2  # of a step: the loss's tokens and the matmuls; half a run of each would be neither


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a head is trained.

    method: "eagle3" or "medusa". num_drafts: of the chains that it learns to make; of Medusa its heads. shared_head: of Medusa:
    blocks alone are trained, in front of the target's own head. draft_vocab_size: of EAGLE-3, and of Medusa with a shared head:
    tokens that it knows, the most frequent of the answers. length: tokens of a sequence, what is longer is cut.
    save_every: steps between checkpoints. states_gib: most GiB of the disk that the target's states of all answers may take; if
    they would take more, each step computes its own. init: the folder of a head to begin with; None: a new one.

    Raises:
      ValueError: a value out of range.
    """

    method: str = "eagle3"
    num_drafts: int = 4
    shared_head: bool = False
    draft_vocab_size: int = 8192
    steps: int = 600
    batch_size: int = 4
    length: int = 224
    learning_rate: float = 1e-3
    save_every: int = 50
    seed: int = 0
    states_gib: float = 16
    init: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {', '.join(METHODS)}")
        for name, least in (("num_drafts", 1), ("draft_vocab_size", 1), ("steps", 1), ("batch_size", 1), ("save_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.length < self.num_drafts + 3:
            raise ValueError(f"length={self.length} must be at least num_drafts + 3 = {self.num_drafts + 3}: a chain must fit")
        if self.shared_head and self.method != "medusa":
            raise ValueError(f"shared_head=True is of method='medusa', and method is {self.method!r}: leave it out")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be positive")
        if not self.states_gib >= 0:
            raise ValueError(f"states_gib={self.states_gib} must not be negative")
        if self.init is not None:  # one spelling, by which a run that was killed is known again
            object.__setattr__(self, "init", str(Path(self.init)))


class Worth(NamedTuple):
    """What a head's greedy chains are worth: shares[j], of steps whose first j + 1 drafts are all right."""

    shares: list[float]

    @property
    def accepted_length(self) -> float:
        """Tokens of a step with a chain of drafts, on average: the drafts that stand, and one."""
        return 1 + sum(self.shares)


def frequent_tokens(answers: Sequence[Answer], vocab_size: int, size: int) -> np.ndarray:
    """i32[min(size, vocab_size)]: the most frequent of the answers' tokens in order of their ids, filled up with the lowest ids."""
    counts = Counter(token for answer in answers for token in answer.output)
    ranked = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in counts)
    ranked += [token for token, _ in zip(rest, range(min(size, vocab_size) - len(ranked)), strict=False)]
    return np.sort(np.array(ranked, np.int32))


def rank_answers(
    target: Decoder, head: Head, answers: Sequence[Answer], num_drafts: int, *, length: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:  # i32[chains, num_drafts], i64[chains]
    """As `draft_chains.chain_ranks`, of all chains behind tokens of these answers, in their order; and which answer each is of."""

    @jax.jit
    def rank(targets: dict[str, Any], heads: dict[str, Any], batch: Batch) -> tuple[jax.Array, jax.Array]:
        module = with_leaves(head, heads)
        states = draft_chains.target_states(with_leaves(target, targets), module, batch.tokens)
        return draft_chains.chain_ranks(module, states, *batch, num_drafts)

    some, found, of = usable(answers, length), [np.zeros((0, num_drafts), np.int32)], [np.zeros(0, np.int64)]
    for i in range(0, len(some), batch_size):
        rows = some[i : i + batch_size]
        batch = make_batch([*rows, *[Answer([0], [])] * (batch_size - len(rows))], length)
        ranks, chains = map(np.asarray, rank(named_leaves(target), named_leaves(head), batch))
        found.append(ranks[chains])
        of.append(i + chains.nonzero()[0])
    return np.concatenate(found), np.concatenate(of)


def find_head(folder: str, method: str, target: ModelConfig) -> EagleFiles | MedusaFiles:
    """A head that lies in a folder, to be trained further by this method. No weight is read. Errors as those of `find_eagle` and
    `find_medusa`."""
    return find_medusa(folder, target) if method == "medusa" else find_eagle(folder, target, version=3)


def _further(head: Head, config: TrainingConfig, target: Decoder, resumes: bool) -> Head:
    """A new head, with the weights of the one that lies at `config.init`, if that is given. resumes: a checkpoint has newer ones.

    Raises:
      FileNotFoundError: nothing lies there.
      ValueError: what lies there is not such a head.
    """
    if config.init is None or resumes:
        return head
    try:
        files = find_head(config.init, config.method, target.config)
        if isinstance(files, MedusaFiles):
            return draft_chains.begin_with(head, load_medusa(files.reader, files.config, jnp.float32))
        return draft_chains.begin_with(head, load_eagle(files.reader, files.config, jnp.float32))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"init={config.init} can't be trained further as a head of {config.method}: {error}") from error


class DraftTrainer:
    """A head in training.

    Args:
      target: stays as it is.
      answers: of the target, to train on.
      config: see there.
      folder: of checkpoints. A run that finds some of the same config there goes on from the newest. The target's states of the
        answers are kept beside it, in a file of its name and `.states`.

    Raises:
      ValueError: no answer is long enough, the checkpoints are of another config, or `config.init` is no such head.
      FileNotFoundError: there is nothing at `config.init`.
    """

    def __init__(self, target: Decoder, answers: Sequence[Answer], config: TrainingConfig, folder: str | Path):
        self.target: Decoder = target
        self.config: TrainingConfig = config
        self.folder: Path = Path(folder)
        self.answers: list[Answer] = usable(answers, config.length)
        if not self.answers:
            raise ValueError(f"none of {len(answers)} answers has two tokens within length={config.length}: raise it")
        head = _further(self._new_head(), config, target, resumes=self._newest() is not None)
        kind: Any = type(head)
        self._abstract: Any = kind.abstract(head.config, "float32")
        leaves = named_leaves(head)
        fixed = {"draft_ids", *(("lm_head/kernel",) if config.shared_head else ())}
        self._fixed: dict[str, Any] = {path: leaf for path, leaf in leaves.items() if path in fixed}
        self.weights: dict[str, Any] = {path: leaf for path, leaf in leaves.items() if path not in self._fixed}
        self._optimizer: Any = self._make_optimizer()
        self._moments: Any = self._optimizer.init(self.weights)
        self.step: int = 0
        self._restore()
        self.states: AnswerStates = AnswerStates(
            target,
            head,
            self.answers,
            length=config.length,
            batch_size=config.batch_size,
            path=self.folder.with_name(self.folder.name + ".states"),
            most_bytes=int(config.states_gib * 2**30),
        )
        self._epoch: tuple[int, np.ndarray] = (-1, np.zeros((0, 0)))
        self._update = jax.jit(self._update_function, donate_argnums=(0, 1))

    def _new_head(self) -> Head:
        c = self.config
        if c.method == "medusa" and not c.shared_head:
            return draft_chains.new_medusa(self.target, c.num_drafts, c.seed)
        ids = frequent_tokens(self.answers, self.target.config.vocab_size, c.draft_vocab_size)
        if c.method == "medusa":
            return draft_chains.new_medusa(self.target, c.num_drafts, c.seed, ids)
        prompt, output = self.answers[0]
        return draft_chains.new_eagle3(self.target, ids, c.seed, prompt + output)

    def _make_optimizer(self) -> Any:
        import optax

        c = self.config
        rate = optax.warmup_cosine_decay_schedule(0.0, c.learning_rate, max(1, int(WARM_UP * c.steps)), c.steps + 1)
        return optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(rate, b2=0.95, weight_decay=0.0))

    @functools.cached_property
    def _num_shared(self) -> int:
        """Tokens that all prompts begin with, the system's. What comes behind them is learnt: prompts too, since the target's
        distributions there are known as well."""
        return len(os.path.commonprefix([answer.prompt for answer in self.answers]))

    def head(self) -> Any:
        """The head with its weights of now."""
        return with_leaves(self._abstract, {**self.weights, **self._fixed})

    def _update_function(
        self, weights: Any, moments: Any, fixed: Any, target: dict[str, Any], batch: Batch, hidden: jax.Array
    ) -> Any:
        import optax

        head = lambda weights: with_leaves(self._abstract, {**weights, **fixed})  # noqa: E731
        states = draft_chains.states_of(with_leaves(self.target, target), head(weights), batch.tokens, hidden)

        def loss(weights: Any) -> jax.Array:
            begins = jnp.minimum(batch.begins, self._num_shared)
            return draft_chains.loss(head(weights), states, batch.tokens, begins, batch.ends, self.config.num_drafts, MIXED)

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, moments = self._optimizer.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    def _chosen(self, step: int) -> np.ndarray:  # i64[batch_size]
        """The answers of a step: in a new random order each time that all were used."""
        per_epoch = max(1, len(self.answers) // self.config.batch_size)
        epoch, place = divmod(step, per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = epoch, shuffled_batches(self.answers, self.config.batch_size, (self.config.seed, epoch))
        return self._epoch[1][place]

    def train(self, report: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Runs the steps that are left, and saves the last state. report: is told each step's number and loss. `states.compute`
        before it makes steps cheaper, and changes no more than rounding."""
        leaves = named_leaves(self.target)
        while self.step < self.config.steps:
            batch, hidden = self.states.batch(self._chosen(self.step))
            self.weights, self._moments, loss = self._update(self.weights, self._moments, self._fixed, leaves, batch, hidden)
            self.step += 1
            if self.step % self.config.save_every == 0 or self.step == self.config.steps:
                self.save()
            report(self.step, float(loss))

    def evaluate(self, answers: Sequence[Answer]) -> Worth:
        """What the head is worth on answers that it was not trained on. ValueError if none is long enough for a chain."""
        c = self.config
        ranks, of = rank_answers(self.target, self.head(), answers, c.num_drafts, length=c.length, batch_size=c.batch_size)
        if not len(ranks):
            raise ValueError(f"no answer of {len(answers)} is long enough for a chain of {self.config.num_drafts} drafts")
        greedy = chain(c.num_drafts)
        return Worth(greedy.shares(ranks[greedy.steps(ranks, of)]))

    # -- checkpoints

    def _state(self) -> dict[str, Any]:
        moments = {f"moments/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(self._moments))}
        return {f"weights/{path}": leaf for path, leaf in self.weights.items()} | moments

    def save(self) -> Path:
        """Writes a checkpoint; two are kept."""
        from checkpoints import orbax

        about = {"step": self.step, "recipe": RECIPE, "num_answers": len(self.answers), "config": asdict(self.config)}
        return orbax.save(self.folder, self._state(), {PROGRESS: json.dumps(about, indent=1)}, keep=2)

    def _newest(self) -> Path | None:
        from checkpoints import orbax

        return orbax.find_version(self.folder)

    def _restore(self) -> None:
        from checkpoints import orbax

        version = self._newest()
        if version is None:
            return
        said = json.loads((version / PROGRESS).read_text())
        now = {"recipe": RECIPE, "num_answers": len(self.answers), **asdict(self.config)}
        then = {"recipe": said.get("recipe", 1), "num_answers": said["num_answers"], **said["config"]}
        same = {name: value for name, value in now.items() if name != "states_gib"}  # which changes no more than rounding
        others = [f"{name}={then.get(name)!r} there, {value!r} now" for name, value in same.items() if then.get(name) != value]
        if others:
            raise ValueError(f"{self.folder} has checkpoints of another run ({'; '.join(others)}): give a new folder")
        state = self._state()
        loaded = orbax.load(version, {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in state.items()})
        self.weights = {path: loaded[f"weights/{path}"] for path in self.weights}
        leaves = [loaded[f"moments/{i}"] for i in range(len(jax.tree.leaves(self._moments)))]
        self._moments = jax.tree.unflatten(jax.tree.structure(self._moments), leaves)
        self.step = said["step"]

    def export(self, folder: str | Path, dtype: Any) -> Path:
        """Writes the head as its authors publish theirs, and Medusa heads that share a head as vLLM has them: config.json and
        model.safetensors, of this dtype; as `find_eagle` and `find_medusa` read it."""
        from safetensors.numpy import save_file

        head, folder, config = self.head(), Path(folder), self.target.config
        if isinstance(head, EagleHead):
            table, said = eagle_keys(head.config), draft_chains.eagle3_config(config, head.config.draft_vocab_size)
        else:
            table = medusa_keys(head.config, ("lm_head.weight",) if head.config.shared_head else ())
            said = draft_chains.medusa_config(head.config)
        tensors: dict[str, np.ndarray] = {}
        for path, source in table.items():
            leaf = self.weights[path] if path in self.weights else self._fixed[path]
            tensors |= tensors_of(source, config, np.asarray(leaf.astype(dtype)))
        if "draft_ids" in self._fixed:
            ids = np.asarray(self._fixed["draft_ids"])
            if isinstance(head, EagleHead):
                tensors["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
                tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
            else:
                tensors["token_map"] = ids.astype(np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(said | {"torch_dtype": str(jnp.dtype(dtype))}, indent=1) + "\n")
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
        return folder
