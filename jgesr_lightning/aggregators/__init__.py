"""The aggregation methods, by name. A new method is one file and one line in `jgesr_lightning.names`.

Names and settings can be asked for without torch; the classes are imported when they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jgesr_lightning import names
from jgesr_lightning.checks import nearest, one_of
from jgesr_lightning.signatures import REQUIRED, Argument, arguments, from_text

if TYPE_CHECKING:
    from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload

__all__ = [
    "Aggregate",
    "Aggregator",
    "Upload",
    "aggregator_arguments",
    "aggregator_class",
    "aggregator_names",
    "aggregator_settings",
    "build_aggregator",
    "min_clients",
]

_CLASSES = ("Aggregate", "Aggregator", "Upload")


def __getattr__(name: str) -> Any:
    """Import a class of `jgesr_lightning.aggregators.base`, and torch with it, when it is asked for."""
    if name in _CLASSES:
        from jgesr_lightning.aggregators import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def aggregator_names() -> tuple[str, ...]:
    """Return the names of our own methods."""
    return tuple(names.BUILTIN["aggregators"])


def aggregator_class(name: str) -> type[Aggregator]:
    """Return the class of a method, or a function that returns one; see `jgesr_lightning.names`.

    Raises:
        ValueError: nothing of that name (the known ones are listed), or no method behind it.
    """
    from jgesr_lightning.aggregators.base import Aggregator

    found = names.find("aggregators", name)
    if isinstance(found, type) and not issubclass(found, Aggregator):
        base = f"{Aggregator.__module__}.Aggregator"
        raise ValueError(f"aggregator.name is {name!r}; {found.__name__} is no subclass of {base}")
    part: type[Aggregator] = found
    return part


def aggregator_arguments(name: str) -> dict[str, Argument]:
    """Return a method's settings with their types and defaults, in the order of its constructor."""
    target = names.BUILTIN["aggregators"].get(name) if isinstance(name, str) else None
    text = from_text(target) if isinstance(target, str) else None
    return arguments(aggregator_class(name)) if text is None else text.arguments


def aggregator_settings(name: str) -> dict[str, Any]:
    """Return a method's settings with their defaults alone."""
    return {setting: argument.default for setting, argument in aggregator_arguments(name).items()}


def min_clients(name: str, settings: dict[str, Any]) -> int:
    """Return the number of clients below which a method, with these settings, cannot work."""
    target = names.BUILTIN["aggregators"].get(name)
    text = from_text(target) if isinstance(target, str) else None
    if text is not None:
        return int(text.constants.get("min_clients", 1))
    return build_aggregator(name, **settings).min_clients


def of_a_function(name: str) -> str:
    """Return what to say of a setting that is missing where it is a function's, and an empty string otherwise."""
    if isinstance(aggregator_class(name), type):
        return ""
    return f"; {names.label(name)} is a function that takes settings and returns an Aggregator, not the method itself"


def build_aggregator(name: str, **settings: Any) -> Aggregator:
    """Return a method by name, with its settings; what is not given keeps the method's default.

    Raises:
        ValueError: unknown name or setting (the message lists the known ones), or a value of wrong type or size.

    >>> build_aggregator("fedprox", mu_prox=0.1).client_terms()
    (Proximal(mu=0.1),)
    """
    from jgesr_lightning.aggregators.base import OWNS, STARTS, Aggregator

    known = aggregator_arguments(name)
    for setting in settings:
        if setting not in known:
            listed = f"known: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{names.label(name)} has no setting {setting!r}{nearest(setting, known)}; {listed}")
    make: Callable[..., Any] = aggregator_class(name)
    if missing := [setting for setting, one in known.items() if one.default is REQUIRED and setting not in settings]:
        raise ValueError(f"{names.label(name)} needs its setting {missing[0]!r}{of_a_function(name)}")
    method = make(**settings)
    kind = type(method)
    if not isinstance(method, Aggregator):
        raise ValueError(f"aggregator.name is {name!r}, which gave a {kind.__name__}; it must give an Aggregator")
    if "_modules" not in vars(method):  # nn.Module's own
        raise ValueError(f"aggregator.name is {name!r}; {kind.__name__}.__init__ must call super().__init__()")
    if (kind.state is Aggregator.state) != (kind.load_state is Aggregator.load_state):
        raise ValueError(
            f"aggregator.name is {name!r}; {kind.__name__} has one of state and load_state; to go on takes both"
        )
    terms = method.client_terms(None)
    if not (isinstance(terms, tuple | list) and all(map(callable, terms))):
        what = f"{kind.__name__}.client_terms must return a tuple of functions of (x, sent)"
        raise ValueError(f"aggregator.name is {name!r}; {what}; it returned a {type(terms).__name__}")
    for key, words in (("start", STARTS), ("own", OWNS)):
        one_of(f"{kind.__name__}.{key}", getattr(method, key), words)
    if not hasattr(method, "name"):
        kind.name = names.label(name)
    return method
