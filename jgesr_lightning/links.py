"""A link of one's own: a function of one client's model, what it is given, and what can be set of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jgesr_lightning import names
from jgesr_lightning.signatures import Argument, arguments

GIVEN = ("previous", "round", "client", "noise_std", "missing_rate")
"""What a link's function gets besides the model, where it names it."""

LEVELS = {"noise": "noise_std", "missing_rate": "missing_rate"}
"""Setting of the channel -> how a link's function asks for it."""


def link_function(name: str) -> Callable[..., Any]:
    """Return the function of a link that is none of ours.

    Raises:
        ValueError: nothing of that name, or no function of a model.
    """
    found: Callable[..., Any] = names.find("channels", name)
    head = f"channel.name is {name!r}; {names.label(name)}"
    if isinstance(found, type):
        raise ValueError(f"{head} is a class; it must be a function of a model")
    try:
        parameters = list(inspect.signature(found).parameters.values())
        inspect.signature(found).bind_partial(None)
    except (TypeError, ValueError):  # the latter: written in C, and nothing tells what it takes
        raise ValueError(f"{head} must be a function of a model, which comes first and by position") from None
    if parameters[0].name in GIVEN:
        raise ValueError(f"{head} takes {parameters[0].name} first; it must take the model first")
    return found


def link_settings(name: str) -> dict[str, Argument]:
    """Return the settings of a link: what its function can be told besides the model and what every link is given."""
    if names.is_builtin("channels", name):
        return {}
    function = link_function(name)
    model = next(iter(inspect.signature(function).parameters))
    return {key: told for key, told in arguments(function).items() if key != model and key not in GIVEN}


def check_levels(name: str, **levels: float) -> None:
    """Raise ValueError for noise or a missing rate that a link's function does not ask for: it would change nothing."""
    if names.is_builtin("channels", name):
        return
    asked = arguments(link_function(name))
    for key, value in levels.items():
        if value and LEVELS[key] not in asked:
            raise ValueError(f"channel.{key} is {value}; {names.label(name)} takes no {LEVELS[key]}, so it must be 0")
