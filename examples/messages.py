"""Anthropic's client on a jaxserve server: a stream, and a tool that is called and answers.

python examples/messages.py                        # a tiny random model: nonsense, at once
python examples/messages.py http://127.0.0.1:8000 Qwen/Qwen3-0.6B
"""

import contextlib
import sys

import anthropic
import tiny

SCHEMA = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": {"type": "object"} | SCHEMA}


def main(url: str | None, model: str) -> None:
    server = contextlib.nullcontext(url) if url else tiny.server()
    with server as address, anthropic.Anthropic(base_url=address, api_key="none") as client:
        turns = [{"role": "user", "content": "Is it warm in Rome?"}]
        with client.messages.stream(model=model, max_tokens=24, messages=turns) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            message = stream.get_final_message()
        print(f"\n{message.usage.output_tokens} tokens, {message.stop_reason}")
        choice = {"type": "tool", "name": "weather"}
        asked = client.messages.create(model=model, max_tokens=200, messages=turns, tools=[TOOL], tool_choice=choice)
        (call,) = [block for block in asked.content if block.type == "tool_use"]
        print(f"{call.name}({call.input})")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
        turns += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        print(client.messages.count_tokens(model=model, messages=turns, tools=[TOOL]).input_tokens, "tokens of prompt")


if __name__ == "__main__":
    main(*(sys.argv[1:3] if len(sys.argv) > 2 else (None, "tiny")))
