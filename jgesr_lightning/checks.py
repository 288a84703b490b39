"""Checks of values that users give: one clear line that names the value and what would do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known word closest to `word`, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the words in `known`."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} is {value!r}{nearest(str(value), known)}; known: {', '.join(known)}")


def number(
    name: str,
    value: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> None:
    """Raise ValueError unless `value` is a finite number within the bounds (booleans are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    if value < at_least:
        raise ValueError(f"{name} is {value!r}; it must be at least {at_least:g}")
    if value <= above:
        raise ValueError(f"{name} is {value!r}; it must be above {above:g}")
    if value > at_most:
        raise ValueError(f"{name} is {value!r}; it must be at most {at_most:g}")


def whole(name: str, value: object, *, at_least: int = 0) -> None:
    """Raise ValueError unless `value` is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < at_least:
        raise ValueError(f"{name} is {value!r}; it must be at least {at_least}")


def flag(name: str, value: object) -> None:
    """Raise ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
