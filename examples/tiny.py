"""A tiny Qwen3 with random weights, and a tokenizer of single letters: what the examples use where no model is given."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import jaxserve

CONFIG = {  # as in a Hugging Face config.json
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 255,
}
TEMPLATE = (
    "{% if tools %}Call as <tool_call>{name, arguments}</tool_call>: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def module(seed: int = 0):
    """A Flax NNX module."""
    return jaxserve.random_model(CONFIG, dtype="float32", seed=seed)


def tokenizer() -> jaxserve.Tokenizer:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return jaxserve.Tokenizer(backend, chat_templates={"default": TEMPLATE})


def llm() -> jaxserve.LLM:
    """An engine of three programs around the tiny model."""
    plan = jaxserve.BucketPlan(decode=(8,), mixed=((128, 8),), head_rows=(8,))
    return jaxserve.LLM.from_params(module(), tokenizer=tokenizer(), bucket_plan=plan, num_pages=64)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server with the tiny model, which it calls "tiny", while the `with` lasts."""
    import uvicorn

    from jaxserve.serving.app import make_app
    from jaxserve.serving.options import ServerOptions

    app = make_app(jaxserve.AsyncLLM(llm()), ServerOptions(names=("tiny",)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
        thread.start()
        while not http.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            http.should_exit = True
            thread.join()
