"""OpenAI's Responses API on a jaxserve server: a conversation that the server keeps, and structured output.

python examples/responses.py                       # a tiny random model: nonsense, at once
python examples/responses.py http://127.0.0.1:8000 Qwen/Qwen3-0.6B
"""

import contextlib
import sys

import openai
import pydantic
import tiny

QUESTIONS = ("Name three grey cats.", "Which of them is the largest?")


class Cat(pydantic.BaseModel):
    tame: bool


def main(url: str | None, model: str) -> None:
    server = contextlib.nullcontext(url) if url else tiny.server()
    with server as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        last = None
        for question in QUESTIONS:
            print(f"> {question}")
            stream = client.responses.create(
                model=model, input=question, previous_response_id=last, max_output_tokens=24, stream=True
            )
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
                elif event.type in ("response.completed", "response.incomplete"):
                    last = event.response.id
                    print(f"\n{event.response.usage.input_tokens} tokens of prompt")
        answer = client.responses.parse(model=model, input="Is a tiger tame?", text_format=Cat, max_output_tokens=200)
        print(repr(answer.output_parsed))


if __name__ == "__main__":
    main(*(sys.argv[1:3] if len(sys.argv) > 2 else (None, "tiny")))
