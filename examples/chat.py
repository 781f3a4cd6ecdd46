"""A conversation: each answer is streamed, and the next question sees all that was said.

python examples/chat.py                            # a tiny random model: nonsense, at once
python examples/chat.py Qwen/Qwen3-0.6B            # a Hugging Face id or folder, or a GGUF file
"""

import sys

import tiny

from jaxserve import LLM, SamplingParams

QUESTIONS = ("Name three grey cats.", "Which of them is the largest?")


def main(model: str | None) -> None:
    llm = LLM(model) if model else tiny.llm()
    params = SamplingParams(temperature=0, max_tokens=48)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        shown = ""
        for _, output in llm.stream(llm.chat_prompts([messages]), params):
            text = output.outputs[0].text
            print(text[len(shown) :], end="", flush=True)
            shown = text
        print()
        messages.append({"role": "assistant", "content": shown})
    print(f"{len(messages)} messages, {llm.engine.stats.num_steps} steps")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
