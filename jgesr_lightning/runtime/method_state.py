"""The state of an aggregation method in a checkpoint: one for all processes, whatever columns each of them holds."""

from __future__ import annotations

import functools
import io
import logging
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jgesr_lightning.aggregators.base import Aggregator
from jgesr_lightning.runtime import contents
from jgesr_lightning.runtime.sharding import Sharding

logger = logging.getLogger(__name__)

ALIKE = 1e-6
"""How far sums may differ between processes, relatively: kinds of processors round differently."""


BASE = frozenset((*vars(nn.Module()), "warned"))
"""Attributes that every method has from its base class."""


class StateError(ValueError):
    """A method's state is not what can be kept for all processes; the message names the entry."""


def gathered(aggregator: Aggregator, sharding: Sharding) -> dict[str, Any]:
    """Return the state of a method with all columns; to be called by every process.

    Raises:
        StateError: an entry of `column_state` has not this process's columns, or another one differs between processes.
    """
    state: dict[str, Any] = aggregator.state()
    if contents.of_method(state):
        return state  # which is refused where it is written
    columns = [name for name in sorted(state) if name in aggregator.column_state and state[name] is not None]
    if sharding.world_size > 1:
        _refuse_differing(state, columns, sharding)
    return {**state, **{name: _whole(name, state[name], sharding) for name in columns}}


def _refuse_differing(state: dict[str, Any], columns: Sequence[str], sharding: Sharding) -> None:
    """Raise StateError where an entry, but those of `columns`, is not what other processes have."""
    names = sorted(state)
    if not _alike([_measured(names)], sharding)[0]:
        raise StateError("state() has other entries on another process")
    others = [name for name in names if name not in columns]
    alike = _alike([_measured(state[name]) for name in others], sharding) if others else []
    if False in alike:
        raise StateError(
            f"state()[{others[alike.index(False)]!r}] differs between processes, of which the first's would be kept; "
            "pass sums over columns through upload.reduce, and name what has a column a parameter in the class "
            "attribute column_state"
        )


def _whole(name: str, part: Any, sharding: Sharding) -> Tensor:
    """Return an entry with the columns of all processes."""
    held = sharding.columns.stop - sharding.columns.start
    shape = tuple(part.shape) if isinstance(part, Tensor) else ()
    if sharding.any(shape[-1:] != (held,)):
        what = f"of shape {shape}" if shape else f"a {type(part).__name__}"
        raise StateError(f"state()[{name!r}] is {what}; by column_state its last dimension is the {held} columns held")
    sent = {torch.bool: torch.uint8, torch.float16: torch.float32, torch.bfloat16: torch.float32}
    whole = part.new_zeros(*shape[:-1], sharding.size, dtype=sent.get(part.dtype, part.dtype))
    whole[..., sharding.columns] = part
    return sharding.sum(whole).to(part.dtype)


def restore(aggregator: Aggregator, state: dict[str, Any], sharding: Sharding) -> None:
    """Give a method what `gathered` returned, with this process's columns.

    Raises:
        StateError: an entry that is not in `column_state` has the columns of all processes, one process having kept it.
    """
    held = sharding.columns.stop - sharding.columns.start
    for name, entry in state.items():
        whole = isinstance(entry, Tensor) and entry.shape[-1:] == (sharding.size,)
        if whole and held < sharding.size != sharding.num_clients and name not in aggregator.column_state:
            raise StateError(
                f"state()[{name!r}] has a column for each of the {sharding.size} parameters, of which this process "
                f"holds {held}; name it in the class attribute column_state, or go on with one process"
            )
    own = {
        name: state[name][..., sharding.columns].clone()
        for name in aggregator.column_state
        if isinstance(state.get(name), Tensor)
    }
    aggregator.load_state({**state, **own})


def copied(state: Any) -> Any:
    """Return a state with tensors and tables of its own; tensors without their gradients, as a checkpoint has them."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(copied, state))
    return state.detach().clone() if isinstance(state, Tensor) else state


class Unsaved:
    """Warns, once, of attributes in which a method without a `state` remembers something: no checkpoint has them.

    It looks after the first two rounds alone: what a method holds may be large.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._before = None if type(aggregator).state is not Aggregator.state else _marks(aggregator)
        self._left = 2

    def look(self) -> None:
        """Warn if attributes are not what they were before the first round."""
        if self._before is None or not self._left:
            return
        self._left -= 1
        before, now = self._before, _marks(self._aggregator)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            self._before = None
            logger.warning(
                "%s changes %s from round to round but has no state(): if results depend on that, a resumed run ends "
                "in others; give it away in state() and take it back in load_state(), see docs/bring-your-own.md",
                type(self._aggregator).__name__,
                ", ".join(f"self.{name}" for name in names),
            )


def _marks(aggregator: Aggregator) -> dict[str, int]:
    """Return for each attribute of a method's own a number that is another one once it was changed or replaced."""
    kept = vars(aggregator)
    cached = {name for name in kept if isinstance(getattr(type(aggregator), name, None), functools.cached_property)}
    own = {name: value for name, value in kept.items() if name not in BASE | cached}
    own |= {name: value for group in ("_parameters", "_buffers", "_modules") for name, value in kept[group].items()}
    return {name: _mark(value) for name, value in own.items()}


def _mark(value: object) -> int:
    written = io.BytesIO()
    try:
        _Marker(written, protocol=5).dump(value)
    except Exception:  # a lock, a function within a function: which one it is has to do
        return id(value)
    return hash(written.getvalue())


class _Marker(pickle.Pickler):
    """Writes what an object holds, for comparison alone; of a tensor, which it is and how often it was changed."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return complex, (id(value), 0 if value.is_inference() else value._version)
        if isinstance(value, torch.Generator):
            return bytes, (value.get_state().numpy().tobytes(),)
        return NotImplemented


def _alike(measured: list[tuple[float, float]], sharding: Sharding) -> list[bool]:
    """Return of each measured value whether it is that of all processes."""
    mine = torch.tensor(measured, dtype=torch.float64)
    away = abs(sharding.sum(mine) / sharding.world_size - mine) > ALIKE * mine.abs()
    return [not one for one in (sharding.sum(away.any(1).to(torch.float64)) > 0).tolist()]


def _measured(value: Any) -> tuple[float, float]:
    """Return how many numbers and letters a state holds, and the sum of their sizes."""
    leaves = list(_leaves(value))
    return float(sum(leaf.numel() for leaf in leaves)), float(sum(leaf.nan_to_num().abs().sum() for leaf in leaves))


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Tensor):
        real = torch.view_as_real(value) if value.is_complex() else value
        yield real.detach().to("cpu", torch.float64)
    elif isinstance(value, str):
        yield torch.tensor(list(value.encode()), dtype=torch.float64)
    elif value is not None:
        yield torch.tensor([float(value)], dtype=torch.float64)
