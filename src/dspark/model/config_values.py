"""Values of a config, read one by one: each reader names the key, what came and what is needed."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from typing import Any


class MarkovKind(enum.StrEnum):
    """The Markov heads of CONTRACTS.md section 10."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


Reader = Callable[[str, Any], Any]
"""(the key as it is written, its value) -> the value in the field's own terms; ``ValueError`` names the key."""


def whole(least: int) -> Reader:
    """An int, not a bool and not a float, of at least ``least``."""

    def read(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key}: got {value!r}, need an int >= {least}")
        return value

    return read


def positive(key: str, value: Any) -> float:
    """A finite number > 0, not a bool."""
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 0 < value <= sys.float_info.max:  # NaN compares false, and a JSON int may be beyond a float
        raise ValueError(f"{key}: got {value!r}, need a finite number > 0")
    return float(value)


def flag(key: str, value: Any) -> bool:
    """A bool, not 0 or 1."""
    if not isinstance(value, bool):
        raise ValueError(f"{key}: got {value!r}, need true or false")
    return value


def inverted(key: str, value: Any) -> bool:
    """A bool that says the opposite of the field."""
    return not flag(key, value)


def listed(item: Reader) -> Reader:
    """A list whose every item ``item`` reads."""

    def read(key: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key}: got {value!r}, need a list")
        return tuple(item(f"{key}[{index}]", one) for index, one in enumerate(value))

    return read


def text(key: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{key}: got {value!r}, need a string")
    return value


def markov_kind(key: str, value: Any) -> MarkovKind:
    """The name of a Markov head, in any case."""
    name = text(key, value).lower()
    if name not in tuple(MarkovKind):
        raise ValueError(f"{key}: got {value!r}, need one of {', '.join(MarkovKind)}")
    return MarkovKind(name)


def mapping(key: str, value: Any) -> dict[str, Any]:
    """A mapping without its nulls."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: got {value!r}, need a mapping")
    return {name: one for name, one in value.items() if one is not None}


def rope(key: str, value: Any) -> dict[str, Any]:
    """RoPE settings of all layers: settings per layer type are refused."""
    settings = mapping(key, value)
    nested = sorted(name for name, one in settings.items() if isinstance(one, Mapping))
    if nested:
        raise ValueError(f"{key}: got settings of their own for {', '.join(nested)}, need the same for every layer")
    return settings


def hooked_before(key: str, value: Any) -> tuple[int, ...]:
    """Taps counted as the layer that they come before (0: the embedding), as taps after a layer (F1-4)."""
    return tuple(one - 1 for one in listed(whole(1))(key, value))
