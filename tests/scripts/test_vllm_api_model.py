"""The scripted model of scripts.vllm_api_tests says its script, and nothing that would need two successors of a token."""

import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, pre_tokenizers

from scripts.vllm_api import scripted_model
from scripts.vllm_api.scripted_model import SAID, THINKING

SPECIALS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of words, blanks apart."""
    split = pre_tokenizers.Split(tokenizers.Regex(r" ?\w+|\n+|[^\w\s]"), "isolated")
    words = [
        word
        for text in (THINKING, SAID, "assistant\n", "\n\n", '"}', " could", " keeps", "7")
        for word, _ in split.pre_tokenize_str(text)
    ]
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}))
    made.pre_tokenizer = split
    made.add_special_tokens(SPECIALS)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def said_after(folder, prompt: str) -> list[str]:
    """The greedy answer, up to its end, computed from the tables alone: the layers add nothing."""
    tensors = load_file(folder / "model.safetensors")
    assert not tensors["model.layers.0.self_attn.o_proj.weight"].any() and not tensors["model.layers.0.mlp.down_proj.weight"].any()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    token, texts = tokenizer.encode(prompt).ids[-1], list[str]()
    while len(texts) < 100 and texts[-1:] != ["<|im_end|>"]:
        x = tensors["model.embed_tokens.weight"][token]
        token = int(np.argmax(tensors["lm_head.weight"] @ (x / np.sqrt(np.mean(x**2)))))
        texts.append(str(tokenizer.id_to_token(token)))
    return texts


def test_an_answer_is_the_script(folder):
    call = '{"name": "f"}'
    out = scripted_model.save(folder / "out", folder, call)
    answer = f"{SAID}<tool_call>{call}</tool_call><|im_end|>"
    assert "".join(said_after(out, "assistant\n")) == f"<think>{THINKING}</think>{answer}"
    assert "".join(said_after(out, "<think>\n\n</think>\n\n")) == answer, "a template without thinking"
    at_once = scripted_model.save(folder / "at_once", folder, call, before=())
    assert "".join(said_after(at_once, "assistant\n")) == f"<tool_call>{call}</tool_call><|im_end|>"
    plain = scripted_model.save(folder / "plain", folder, first="<|im_start|>")
    assert tokenizers.Tokenizer.from_file(str(plain / "tokenizer.json")).encode("7").tokens == ["<|im_start|>", "7"]
    assert "".join(said_after(plain, "assistant\n")) == "".join(said_after(plain, " keeps")) == SAID + "<|im_end|>"
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(
        load_file(out / "model.safetensors")["lm_head.weight"]
    )


def test_a_token_that_would_need_two_successors_is_refused(folder, monkeypatch):
    monkeypatch.setattr(scripted_model, "SAID", "Hello!! How can I help you today")
    with pytest.raises(ValueError, match="each once"):
        scripted_model.save(folder / "out", folder)


def test_blanks_are_unlikely_and_digits_likely(folder):
    """Of two tokens that a grammar allows, with no script between them."""
    out = scripted_model.save(folder / "out", folder)
    tokenizer, tensors = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")), load_file(out / "model.safetensors")
    biases = tensors["lm_head.weight"][:, -1]
    word, blank, digit = (biases[tokenizer.encode(text, add_special_tokens=False).ids[0]] for text in (" could", "\n\n", "7"))
    assert blank < word < digit
