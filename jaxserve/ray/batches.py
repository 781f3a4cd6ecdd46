"""An engine for `ray.data.Dataset.map_batches`: columns of prompts in, columns of completions out. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.sampling_params import SamplingParams

KINDS = ("prompt", "prompt_token_ids", "messages")


class Generate:
    """Completes the prompts of batches. Ray Data makes one in each of its actors.

        prompts = ray.data.read_parquet("prompts.parquet")
        prompts.map_batches(
            Generate,
            fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "params": {"max_tokens": 128}},
            batch_size=512, compute=ray.data.ActorPoolStrategy(size=2), num_gpus=1,
        ).write_parquet("completions")

    A batch has one of the columns "prompt" (texts), "prompt_token_ids" and "messages" (chats). It comes back with four more:
    "generated_text", "generated_token_ids" (lists), "finish_reason", and "error", empty but for a prompt that could not be run: its
    finish_reason is "error", and the others of its batch are completed. Rows keep their order.

    Args:
      model, tokenizer, skip_tokenizer_init, engine: as `LLM`'s; engine are its options.
      params: fields of SamplingParams, for all prompts; what they leave out is the model's default. `n` is 1.

    Raises:
      ValueError: as `LLM`; a parameter out of its range, an n other than 1, or a batch without a column of prompts.
    """

    def __init__(
        self,
        model: str,
        params: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        engine: Mapping[str, Any] | None = None,
    ):
        from jaxserve.llm import LLM

        given = dict(params or {})
        if SamplingParams(**given).n != 1:
            raise ValueError(f"params: n={given['n']} must be 1: a row has one completion")
        self._llm = LLM(model, tokenizer, skip_tokenizer_init, **dict(engine or {}))
        self._params = self._llm.get_default_sampling_params().with_(**given)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        kinds = [kind for kind in KINDS if kind in batch]
        if len(kinds) != 1:
            raise ValueError(f"a batch must have one of the columns {', '.join(KINDS)}; it has {', '.join(map(str, batch))}")
        inputs, rows, errors = [], [], dict[int, str]()
        for row, value in enumerate(batch[kinds[0]]):
            try:
                inputs.append(self._prompt(kinds[0], value))
                rows.append(row)
            except (ValueError, TypeError) as error:
                errors[row] = str(error)
        num_rows = len(batch[kinds[0]])
        texts, ids, reasons = [""] * num_rows, np.empty(num_rows, object), ["error"] * num_rows
        ids[:] = [[] for _ in range(num_rows)]
        for index, output in self._llm.stream(inputs, self._params, on_error="return") if inputs else ():
            if output.finished:
                (completion,) = output.outputs
                row, reasons[rows[index]] = rows[index], str(completion.finish_reason)
                if completion.finish_reason == "error":
                    errors[row] = str(completion.stop_reason)
                else:
                    texts[row], ids[row] = completion.text, list(completion.token_ids)
        return {
            **batch,
            "generated_text": np.array(texts, object),
            "generated_token_ids": ids,
            "finish_reason": np.array(reasons, object),
            "error": np.array([errors.get(row, "") for row in range(num_rows)], object),
        }

    def _prompt(self, kind: str, value: Any) -> Any:
        if kind == "messages":
            return self._llm.chat_prompts([dict(message) for message in value])[0]
        return {kind: [int(token) for token in value] if kind == "prompt_token_ids" else str(value)}
