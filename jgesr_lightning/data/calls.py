"""Call a function of somebody else's with those options that it names: it need not list what it does not use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def call(function: Callable[..., Any], *arguments: Any, **offered: Any) -> Any:
    """Return ``function(*arguments, **options)`` with the offered options that its signature has a place for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(*arguments, **offered)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return function(*arguments, **{name: value for name, value in offered.items() if name in named})
