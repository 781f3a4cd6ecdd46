"""Random JSON schemas and regular expressions whose every instance is short."""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = ("a", "bc", "name", "a key", "é", 'q"uote', "x_1")


def schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """A JSON schema (draft 2020-12), nested at most `depth` deep."""
    kinds = ["integer", "digit", "string", "pattern", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf"] * (depth > 0)
    kind = "object" if depth == 2 and rng.random() < 0.5 else kinds[rng.integers(len(kinds))]
    if kind == "integer":
        low = int(rng.integers(-50, 50))
        return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 2000))}
    if kind == "digit":
        return {"type": "integer", "minimum": 0, "maximum": 9}
    if kind == "string":
        least = int(rng.integers(0, 4))
        return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 6))}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^{regex(rng, 0)}$"}
    if kind == "enum":
        return {"enum": [["x", 1, None, [2, "y"], {"k": False}][i] for i in range(1 + rng.integers(5))]}
    if kind == "const":
        return {"const": {"fixed": ["text that is forced", 12345, {"deep": True}]}}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth - 1) for _ in range(1 + rng.integers(3))]}
    if kind == "array":
        least = int(rng.integers(0, 3))
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + int(rng.integers(0, 3))}
    if kind == "object":
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: rng.integers(4)]]
        properties = {name: schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def regex(rng: np.random.Generator, depth: int = 1) -> str:
    """A regular expression that Python's re and Rust's regex read alike, and Python's without much backtracking."""
    atoms = ["[a-c]", "x", "[0-9]", '[^a-y\\n\\r"\\\\\\x00-\\x1f\\x7f-\\U0010ffff]', "(?:yes)", "-"]
    pieces = []
    for _ in range(1 + rng.integers(3)):
        piece = atoms[rng.integers(len(atoms))]
        low = int(rng.integers(0, 3))
        piece += ["", "?", f"{{{low},{low + 2}}}"][rng.integers(3)]
        if depth and rng.random() < 0.4:
            piece = f"(?:{regex(rng, depth - 1)}|{regex(rng, depth - 1)})" + ["", "?"][rng.integers(2)]
        pieces.append(piece)
    return "".join(pieces)
