"""Tokenizers of each make with a vocabulary of a few hundred tokens, and folders that hold them."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
SPECIALS = ["<s>", "</s>", "<|turn|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "héllo wörld", "漢字 かな 🙂 👩‍👩‍👧", "hello the world, the end"] * 3


def byte_level_backend(*, bos: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges, three special tokens, and an added one with characters outside the byte alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet))
    backend.add_tokens([AddedToken("<tool call é>", normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """The make of Llama 2's tokenizer: spaces as U+2581, bytes for what the vocabulary lacks, the first space dropped again."""
    words = ["▁", "▁the", "▁he", "llo", "o", "h", "e", "l", "t", "w", "r", "d", "▁w", "▁wo", "rld", "th", "he"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("t", "h"), ("h", "e"), ("▁", "w"), ("▁", "he"), ("▁w", "o")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


BYTE_LEVEL = Tokenizer(byte_level_backend(bos=True), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())


def pieces(tokenizer: Tokenizer, ids: list[int], prompt_ids: Sequence[int] = (), skip: bool = True) -> list[str]:
    """What each token adds, and last what `flush` does."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip)
    return [*map(detokenizer.step, ids), detokenizer.flush()]


def save(folder: Path, config: dict | None = None, backend: tokenizers.Tokenizer | None = None) -> Path:
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
