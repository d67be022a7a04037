"""What a worker refuses before it takes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.ops import arguments


def at_most(name: str, value: int | None, most: int) -> int:
    """``value``, or ``most`` for None; ``ValueError`` below 1 and above ``most``."""
    if value is None:
        return most
    arguments.require_int(name, value, 1)
    if value > most:
        raise ValueError(f"{name}: got {value}, need at most {most}")
    return value


def require_survival(threshold: float | None, draft: Any) -> float | None:
    """``threshold`` as it is; ``ValueError`` for what is no probability, or a draft that does not estimate one."""
    if threshold is not None and not 0.0 <= threshold <= 1.0:
        raise ValueError(f"min_survival: got {threshold}, need a probability from 0 to 1, or None")
    if threshold is not None and not draft.config.confidence_head:
        raise ValueError(f"min_survival: got {threshold}, need None for a draft without a confidence head")
    return threshold


def is_mambaish(target: Any) -> bool:
    """Whether the target keeps recurrent state beside K and V, which a rejected draft must not have touched."""
    return getattr(target, "state_layout", None) is not None


def require_states(target: Any, cache: Any) -> None:
    """``ValueError`` for a cache that cannot commit what a hybrid target keeps."""
    states = getattr(cache, "states", None)
    commits = all(hasattr(states, name) for name in ("commit", "commit_steps"))
    if getattr(cache, "state_pool", None) is None or not commits:
        raise ValueError(
            f"target: got {type(target).__name__}, which keeps recurrent state, with a {type(cache).__name__} that "
            "cannot commit the states after a verify step; need its state_pool and its states"
        )


def require_tokens(prompt: Sequence[int], most: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens of a prompt; ``ValueError`` for none, for more than ``most``, and for what is no id."""
    tokens = tuple(prompt)
    if not 1 <= len(tokens) <= most:
        raise ValueError(f"prompt: got {len(tokens)} tokens, need 1 to {most}")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"prompt: got the id {token!r}, need ints from 0 to {vocab_size - 1}")
    return tokens
