"""Callbacks of whoever starts a run from Python: checked before it, and what they add to a record made plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jgesr_lightning.checks import nearest, plain
from jgesr_lightning.config import ConfigError
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.records import FederationState, RoundRecord
from jgesr_lightning.timing import Stopwatch

HOOKS = (
    "on_federation_start", "on_round_start", "on_client_delivered", "on_client_trained", "on_round_end",
    "on_federation_end",
)  # fmt: skip


def check(callbacks: object) -> None:
    """Raise ConfigError for what is no list of objects with hooks, and for a hook that nobody would call."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks is a {type(callbacks).__name__}; it must be a list of objects")
    for callback in callbacks:
        if isinstance(callback, type):
            name = callback.__name__
            raise ConfigError(f"callbacks holds the class {name}; give an object of it, {name}()")
        kind = type(callback)
        written = [part for part in kind.__mro__ if not part.__module__.startswith("lightning.")]  # its are no mistake
        for name in (name for part in written for name in vars(part) if name.startswith("on_")):
            if name not in HOOKS:
                hint = f"{nearest(name, HOOKS)}; there are {', '.join(HOOKS)}"
                raise ConfigError(f"{kind.__name__}.{name} is no hook{hint}")
        if not any(hasattr(callback, name) for name in HOOKS):
            raise ConfigError(f"callbacks holds a {kind.__name__}, which has none of {', '.join(HOOKS)}")


class Plain:
    """Goes behind them, before anything is written: every file of a run can hold what is in its records."""

    def on_round_end(self, plan: RoundPlan, state: FederationState, record: RoundRecord, watch: Stopwatch) -> None:
        """Make plain numbers of what was added to a record.

        Raises:
            ValueError: something else was; it is taken out again, so that the run can be accounted for.
        """
        tables: dict[str, dict[Any, Any]] = {"metrics": record.metrics, "clients": record.clients, "info": record.info}
        for what, table in tables.items():
            for name in list(table):
                if not isinstance(name, str):
                    del table[name]
                    raise ValueError(f"a callback's {name!r} in a record's {what} is no name; it must be a text")
        for name, value in list(record.metrics.items()):
            try:
                record.metrics[name] = _number(value)
            except (TypeError, ValueError, OverflowError):
                del record.metrics[name]
                what = f"{name!r} in a record's metrics is a {type(value).__name__}"
                raise ValueError(f"a callback's {what}; it must be a number") from None
        count = len(plan.weights)
        for name, values in list(record.clients.items()):
            try:
                found = plain(name, values)
                if len(found) != count:
                    raise ValueError
                record.clients[name] = [_number(value) for value in found]
            except (TypeError, ValueError, OverflowError):
                del record.clients[name]
                what = f"{name!r} in a record's clients"
                raise ValueError(f"a callback's {what} must be {count} numbers, one for each client") from None
        for name, value in list(record.info.items()):
            try:
                record.info[name] = plain(f"a callback's {name!r} in a record's info", value)
            except ValueError:
                del record.info[name]
                raise


def _number(value: object) -> float:
    if isinstance(value, str):  # which `float` would read
        raise TypeError
    return float(plain("", value))
