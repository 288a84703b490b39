"""Call a function of somebody else's with those options that it names: it need not list what it does not use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.names import cause


def call(key: str, function: Callable[..., Any], *arguments: Any, **offered: Any) -> Any:
    """Return ``function(*arguments, **options)`` with the offered options that its signature has a place for.

    Args:
        key: the setting that names the function, and its value, for messages: ``data.name=blobs``.
        function: what is called.
        arguments: by position, always given.
        offered: by name, given if they are wanted.

    Raises:
        ValueError: it needs something else.
        DataError: it is none of this package's, and fails; the message says where.

    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
        offered = {name: value for name, value in offered.items() if name in named}
    try:
        signature.bind(*arguments, **offered)
    except TypeError as error:
        name = getattr(function, "__name__", function)
        raise ValueError(f"{key}; {name}{signature} cannot be called for this: {error}") from None
    if getattr(function, "__module__", "").startswith("jgesr_lightning."):
        return function(*arguments, **offered)
    try:
        return function(*arguments, **offered)
    except DataError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise DataError(f"{getattr(function, '__name__', function)} failed: {cause(error)}") from error
