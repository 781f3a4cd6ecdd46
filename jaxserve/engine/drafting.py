"""What an engine that speculates makes beside its model.

Owns which host objects a method needs, and the model that drafts: found, checked against the target, and taken apart for programs.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from jaxserve.config import EngineConfig
from jaxserve.engine.kernel_choice import choose_kernels
from jaxserve.engine.resolution import model_functions
from jaxserve.execution.draft_functions import HeadFunctions, TakenApart
from jaxserve.execution.model_functions import LayerKernels, ModelFunctions, weights_dtype
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.eagle import EagleFiles, EagleHead, find_eagle, load_eagle
from jaxserve.models.files import ModelFiles, find_model
from jaxserve.models.medusa import MedusaConfig, MedusaFiles, MedusaHeads, find_medusa, load_medusa
from jaxserve.speculative.draft_lengths import DraftLengths
from jaxserve.speculative.suffix import SuffixDrafts
from kernels.backends import current_platform

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

logger: logging.Logger = logging.getLogger("jaxserve")

Draft = Decoder | EagleHead | MedusaHeads
DraftFiles = ModelFiles | EagleFiles | MedusaFiles
EAGLE_VERSIONS = {"eagle": 1, "eagle3": 3}  # by method
NUM_TEXTS = 256  # tokens whose texts are compared


def make_drafting(config: ResolvedConfig) -> tuple[DraftLengths | None, SuffixDrafts | None]:
    """Both as new; None for what the config does not ask for."""
    speculative, limits = config.speculative, config.scheduler
    if speculative is None:
        return None, None
    lengths = DraftLengths(
        config.plan,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        speculative.num_speculative_tokens,
        speculative.adaptive,
        on_host=speculative.drafts_on_host,
        by_model=speculative.by_model,
    )
    if not speculative.drafts_on_host:
        return lengths, None
    return lengths, SuffixDrafts(speculative, limits.max_num_seqs, limits.max_model_len)


def find_draft(config: EngineConfig, target: ModelConfig) -> DraftFiles | None:
    """The checkpoint that speculative_config names, checked against the target; None where it names none. No weight is read.

    Raises: as `SpeculativeConfig.check_length`; as `find_model` and `check_draft`, as `find_eagle`, or as `find_medusa` and
      `check_medusa`.
    """
    if config.speculative is None:
        return None
    config.speculative.check_length(config.max_model_len or target.max_position_embeddings)
    if config.speculative.model is None:
        return None
    if config.speculative.method in EAGLE_VERSIONS:
        return find_eagle(config.speculative.model, target, version=EAGLE_VERSIONS[config.speculative.method])
    if config.speculative.method == "medusa":
        heads = find_medusa(config.speculative.model, target)
        check_medusa(config, heads.config)
        return heads
    files = find_model(config.speculative.model)
    check_draft(config, target, files.config)
    return files


def same_vocabulary(draft: DraftFiles, tokenizer: str | Path | Tokenizer) -> str | Path | Tokenizer:
    """The target's tokenizer, once it is read and found to give tokens the texts that the draft's gives them; what was given where
    the draft is heads of the target, which have no tokenizer. tokenizer: the target's, or where it lies.

    Raises: ValueError as `check_vocabulary`, or as `Tokenizer.from_id` for the target's.
    """
    if not isinstance(draft, ModelFiles):
        return tokenizer
    from jaxserve.text.tokenizer import Tokenizer

    try:
        theirs = Tokenizer.from_id(draft.path)
    except ValueError:
        logger.warning("the draft at %s has no tokenizer: that its vocabulary is the target's is taken for granted", draft.path)
        return tokenizer
    ours = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_id(tokenizer)
    check_vocabulary(draft.path, ours, theirs)
    return ours


def load_draft(files: DraftFiles | None, target: Any) -> Draft | None:
    """The model of `find_draft`, in the dtype of the target module's weights; None if there is none. Errors as those of
    `loading.load_model`, `load_eagle` or `load_medusa`."""
    if files is None:
        return None
    if isinstance(files, EagleFiles):
        return load_eagle(files.reader, files.config, weights_dtype(target))
    if isinstance(files, MedusaFiles):
        return load_medusa(files.reader, files.config, weights_dtype(target))
    from jaxserve.models.loading import load_files  # late: it imports the tokenizers library

    return load_files(files, skip_tokenizer_init=True, dtype=str(weights_dtype(target)), transposed=None).module


def check_draft(config: EngineConfig, target: ModelConfig, draft: ModelConfig) -> None:
    """ValueError if a model can't draft for the target."""
    assert config.speculative is not None
    longest = config.max_model_len or target.max_position_embeddings
    faults = []
    if draft.vocab_size != target.vocab_size:
        faults.append(
            f"its vocab_size is {draft.vocab_size}, the target's {target.vocab_size}: take a draft of the same vocabulary"
        )
    if draft.max_position_embeddings < longest:
        faults.append(
            f"its max_position_embeddings={draft.max_position_embeddings} is less than the {longest} tokens that a request may "
            "have: lower max_model_len"
        )
    if faults:
        raise ValueError(f"speculative_config: model={config.speculative.model!r} can't draft for this one: {'; '.join(faults)}")


def check_medusa(config: EngineConfig, heads: MedusaConfig) -> None:
    """ValueError if more drafts are asked for than there are heads."""
    assert config.speculative is not None
    if config.speculative.num_speculative_tokens > heads.num_heads:
        raise ValueError(
            f"speculative_config: num_speculative_tokens={config.speculative.num_speculative_tokens} is more than the "
            f"{heads.num_heads} Medusa heads of model={config.speculative.model!r}, each of which makes one draft: lower it"
        )


def check_vocabulary(model: Any, target: Tokenizer, draft: Tokenizer) -> None:
    """ValueError if some of the tokens that are compared have other texts. model: what the draft is called."""
    ids = np.unique(np.linspace(0, target.vocab_size - 1, NUM_TEXTS).astype(int)).tolist()
    ours, theirs = ([tokenizer.decode([i], skip_special_tokens=False) for i in ids] for tokenizer in (target, draft))
    other = [i for i, our, their in zip(ids, ours, theirs, strict=True) if our != their]
    if other:
        first = ids.index(other[0])
        raise ValueError(
            f"speculative_config: model={model!r} has another vocabulary than the target: of {len(ids)} tokens that were compared "
            f"{len(other)} have other texts, the first is {other[0]}: {theirs[first]!r}, and {ours[first]!r} in the target"
        )


def attention_config(draft: Draft | DraftFiles | None) -> ModelConfig | None:
    """Of the layers in which a draft attends; None where it does not."""
    if isinstance(draft, EagleHead | EagleFiles):
        return draft.config.layer
    return draft.config if isinstance(draft, Decoder | ModelFiles) else None


def draft_functions(draft: Draft, config: EngineConfig, target: ModelFunctions) -> TakenApart:
    """What drafts, taken apart for the programs of its target. On a CPU the layers of a draft model or head run our kernels as the
    target's do. On a GPU they are XLA's, but for the attention: no qualification asks a card about their other shapes.

    Raises:
      NotImplementedError: the target lies on several devices.
      ValueError: nothing asks for it; it is of another method; as `check_draft` or `check_medusa`; it is for another target;
        weights of another dtype.
    """
    if config.speculative is None or config.speculative.model is None:
        raise ValueError("draft= is given, and speculative_config asks for no model: leave one of them out")
    if target.shards is not None:
        raise NotImplementedError("speculative_config: models that draft run on one device, and the target is cut for several")
    method, (given, what) = config.speculative.method, _kind(draft)
    if method != given:
        raise ValueError(f"speculative_config: {method=} and draft= is {what}: change one of them")
    if isinstance(draft, Decoder):
        functions: TakenApart = _model_functions(draft, config, target)
    else:
        if isinstance(draft, MedusaHeads):
            check_medusa(config, draft.config)
        if faults := draft.config.faults(target.model_config):
            raise ValueError(f"draft= is {what} for another target: {'; '.join(faults)}")
        functions = _head_functions(draft, target)
    if functions.dtype != target.dtype:
        raise ValueError(
            f"speculative_config: the draft's weights are {functions.dtype}, the target's {target.dtype}: load both in one dtype"
        )
    return functions


def _head_functions(head: EagleHead | MedusaHeads, target: ModelFunctions) -> HeadFunctions[Any]:
    """On a CPU its matrices are laid out anew, and multiplied by what multiplies the target's."""
    fused = None
    if current_platform() == "cpu":
        head, fused = nnx.merge(*nnx.split(head)), target.kernels.fused
        head.transpose()
    return HeadFunctions(head, head.config, head.config.layer if isinstance(head, EagleHead) else None, fused)


def _kind(draft: Draft) -> tuple[str, str]:
    """(the method of which it is, what it is)."""
    if isinstance(draft, EagleHead):
        version = draft.config.version
        return next(method for method, of in EAGLE_VERSIONS.items() if of == version), f"an EAGLE-{version} head"
    return ("medusa", "Medusa heads") if isinstance(draft, MedusaHeads) else ("draft_model", "a decoder")


def _model_functions(draft: Decoder, config: EngineConfig, target: ModelFunctions) -> ModelFunctions:
    check_draft(config, target.model_config, draft.config)
    kernels = LayerKernels(moe="xla")
    if current_platform() == "cpu":
        kernels = choose_kernels(draft.config, weights_dtype(draft), replace(config, skip_qualification=True)).layer
    return model_functions(draft, config, kernels)
