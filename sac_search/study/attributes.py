"""Values of a study that are too long for one attribute: MySQL takes 64 KiB at most.

A long value is stored in parts, and its own attribute says which. Short ones stay as they are, so
that any tool can read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from typing import Any

_PARTS = "parts"
# Characters of ASCII; as a string in JSON some are written as two.
_LONGEST = 30_000


def split_value(name: str, value: Any) -> dict[str, Any]:
    """Returns the attributes that hold `value` under `name`, in the order in which to write them.

    Whoever reads between two writes finds the value that was there before.
    """
    text = json.dumps(value)
    if len(text) <= _LONGEST:
        return {name: value}
    # Parts of another value have other names.
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    parts = {
        f"part {digest}.{start // _LONGEST}{_suffix(name)}": text[start : start + _LONGEST]
        for start in range(0, len(text), _LONGEST)
    }
    return {**parts, name: {_PARTS: list(parts)}}


def outdated_parts(
    name: str, current: Container[str], attributes: Mapping[str, Any]
) -> Iterator[str]:
    """Yields the parts of earlier values of `name` that still hold something."""
    for part, text in attributes.items():
        is_part = part.startswith("part ") and part.endswith(_suffix(name))
        if is_part and text and part not in current:
            yield part


def _suffix(name: str) -> str:
    return f" of {name}"


def joined_value(name: str, attributes: Mapping[str, Any]) -> Any:
    """Returns the value that is stored under `name`; None where there is none.

    Raises:
        ValueError: a part of it is missing.
    """
    stored = attributes.get(name)
    if not isinstance(stored, dict) or stored.keys() != {_PARTS}:
        return stored
    try:
        return json.loads("".join(attributes[part] for part in stored[_PARTS]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"a part of {name} is missing") from error
