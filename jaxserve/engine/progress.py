"""The progress bar of offline generation: prompts done, and tokens a second."""

from __future__ import annotations

from jaxserve.outputs import RequestOutput


class ProgressBar:
    """A tqdm bar on stderr over `total` prompts, with prompt and output tokens a second. Close it, or use it in a `with`."""

    def __init__(self, total: int, *, disable: bool = False):
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True, disable=disable)
        self._prompt_tokens = self._output_tokens = self._draft_tokens = self._accepted_tokens = 0

    def advance(self, output: RequestOutput) -> None:
        """One more prompt is done, and this is what came of it."""
        if self._bar.disable:
            return
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(o.token_ids) for o in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        rates = f"in {self._prompt_tokens / seconds:.0f} tok/s, out {self._output_tokens / seconds:.0f} tok/s"
        if output.metrics is not None:
            self._draft_tokens += output.metrics.num_draft_tokens
            self._accepted_tokens += output.metrics.num_accepted_tokens
        if self._draft_tokens:
            rates += f", {100 * self._accepted_tokens / self._draft_tokens:.0f}% of drafts accepted"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
