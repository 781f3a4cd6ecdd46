"""Which layers each stage of a pipeline has, and to which stage a weight belongs.

The first stage has the embedding, the last one the final norm and the matrix of the logits.
"""

from __future__ import annotations


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, as equally many as can be. Where they do not divide, the first stages have one more: the last one
    has the logits and the sampling besides.

    Raises:
      ValueError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline_parallel_size={num_stages} needs a layer for each stage, and the model has {num_layers} layers: lower it"
        )
    each, more = divmod(num_layers, num_stages)
    ends = [(i + 1) * each + min(i + 1, more) for i in range(num_stages)]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


def stage_of(path: str, layers: tuple[range, ...]) -> int:
    """The stage that holds the weight `path` of `Decoder`. layers: as `stage_layers`. A tied embedding is the first stage's, of
    which the last one has a copy."""
    parts = path.split("/")
    if parts[0] == "embed_tokens":
        return 0
    if parts[0] == "layers":
        return next(i for i, held in enumerate(layers) if int(parts[1]) in held)
    return len(layers) - 1
