"""The scripted model of scripts.vllm_api_tests says its script, and nothing that would need two successors of a token."""

import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, pre_tokenizers

from jaxserve import LLM, SamplingParams
from scripts.vllm_api import scripted_model
from scripts.vllm_api.scripted_model import SAID, THINKING

SPECIALS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of words, blanks apart."""
    split = pre_tokenizers.Split(tokenizers.Regex(r" ?\w+|\n+|[^\w\s]"), "isolated")
    words = [
        word
        for text in (THINKING, SAID, "assistant\n", "\n\n", '"}', " could", " keeps", "7", "You are called Mark John")
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
    out = scripted_model.save(folder / "out", folder, scripted_model.called(call))
    answer = f"{SAID}<tool_call>{call}</tool_call><|im_end|>"
    assert "".join(said_after(out, "assistant\n")) == f"<think>{THINKING}</think>{answer}"
    assert "".join(said_after(out, "<think>\n\n</think>\n\n")) == answer, "a template without thinking"
    at_once = scripted_model.save(folder / "at_once", folder, scripted_model.called(call, ()))
    assert "".join(said_after(at_once, "assistant\n")) == f"<tool_call>{call}</tool_call><|im_end|>"
    plain = scripted_model.save(folder / "plain", folder, first="<|im_start|>")
    assert tokenizers.Tokenizer.from_file(str(plain / "tokenizer.json")).encode("7").tokens == ["<|im_start|>", "7"]
    assert "".join(said_after(plain, "assistant\n")) == "".join(said_after(plain, " keeps")) == SAID + "<|im_end|>"
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(
        load_file(out / "model.safetensors")["lm_head.weight"]
    )


def test_what_a_form_forbids_gives_way(folder):
    out = scripted_model.save(folder / "out", folder, otherwise='{"a": 1}')
    tensors, tokenizer = load_file(out / "model.safetensors"), tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    x = tensors["model.embed_tokens.weight"][tokenizer.encode("assistant\n").ids[-1]]
    logits = tensors["lm_head.weight"] @ (x / np.sqrt(np.mean(x**2)))
    best, second, third = (int(i) for i in np.argsort(-logits)[:3])
    assert [tokenizer.id_to_token(i) for i in (best, second)] == ["Hello", '{"a": 1}']
    assert logits[best] > logits[second] + 20 and logits[second] > logits[third] + 20
    assert said_after(out, '{"a": 1}') == ["<|im_end|>"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "said"), [("Mark", "Mark"), ("John", "John"), ("John instead Mark today", "Mark"), ("Mark instead John", "Mark")]
)
def test_a_name_is_found_in_the_prompt(folder, prompt, said):
    out = scripted_model.save(folder / "out", folder, ["</think>", "You are called"], names=(" Mark", " John"))
    llm = LLM(out, num_pages=16, max_model_len=128, warm_up="first_use", compilation_cache_dir="")
    asked = f"Hello {prompt} today" + " instead" * 60 + "\nassistant\n"
    (answer,) = llm.generate([asked], SamplingParams(temperature=0, max_tokens=8, skip_special_tokens=False), use_tqdm=False)
    assert llm.tokenizer is not None
    tokens = [llm.tokenizer.decode([i], skip_special_tokens=False) for i in answer.outputs[0].token_ids]
    assert tokens[-2:] == [f" {said}", "<|im_end|>"]


def test_a_token_that_would_need_two_successors_is_refused(folder):
    with pytest.raises(ValueError, match="each once"):
        scripted_model.save(folder / "out", folder, ["Hello!! How can I help you today"])


def test_blanks_are_unlikely_and_digits_likely(folder):
    """Of two tokens that a grammar allows, with no script between them."""
    out = scripted_model.save(folder / "out", folder)
    tokenizer, tensors = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")), load_file(out / "model.safetensors")
    biases = tensors["lm_head.weight"][:, -1]
    word, blank, digit = (biases[tokenizer.encode(text, add_special_tokens=False).ids[0]] for text in (" could", "\n\n", "7"))
    assert blank < word < digit
