"""The settings of a method or a link: one model, built from the signature of the constructor or function."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import create_model

from jgesr_lightning import names
from jgesr_lightning.aggregators import aggregator_arguments, aggregator_settings, build_aggregator, of_a_function
from jgesr_lightning.checks import nearest
from jgesr_lightning.config.section import Section
from jgesr_lightning.config.written import Written
from jgesr_lightning.links import check_levels, link_settings
from jgesr_lightning.signatures import REQUIRED, Argument

RESERVED = {"aggregator": ("name",), "channel": ("name", "noise", "missing_rate")}
"""Section that names a part with settings of its own -> its other keys, which no such setting can be called."""


def settings_model(method: str) -> type[Section]:
    """Return the model of a method's settings, with the types and defaults of its constructor's arguments."""
    return _method_model(method, _code("aggregators", method))


@functools.cache
def _method_model(method: str, code: int) -> type[Section]:
    model = _model("aggregator", method, aggregator_arguments(method))
    if any(field.is_required() for field in model.model_fields.values()):
        model.absent = of_a_function(method)
    return model


def link_model(link: str) -> type[Section]:
    """Return the model of a link's settings; one of ours has none."""
    return _link_model(link, _code("channels", link))


@functools.cache
def _link_model(link: str, code: int) -> type[Section]:
    model = _model("channel", link, link_settings(link))
    model.absent = f"; {names.label(link)} has no default for it"
    return model


MODELS = {"aggregator": settings_model, "channel": link_model}
"""Section -> what makes the model of the settings of the part that it names."""


def _code(kind: str, name: str) -> int:
    """Return a number of what stands behind a name today: another one once its file was edited; 0 for ours."""
    return 0 if names.is_builtin(kind, name) else id(names.find(kind, name))  # modules stay: no id comes again


def _model(section: str, part: str, told: Mapping[str, Argument]) -> type[Section]:
    """Return the model of the settings of a part, of which `told` tells."""
    fields: dict[str, Any] = {}
    for key, (hint, default) in told.items():
        if key in RESERVED[section] or key.startswith(("_", "model_")):
            raise ValueError(f"{section}.name is {part!r}; its setting {key} must be called otherwise")
        if not isinstance(default, (str, int, float, tuple, list, type(None))) and default is not REQUIRED:
            raise ValueError(f"{section}.name is {part!r}; the default of its setting {key} cannot stand in a file")
        fields[key] = (hint, ... if default is REQUIRED else default)
    with warnings.catch_warnings(action="ignore"):  # a setting may be called `copy`, say
        model: type[Section] = create_model(f"{names.label(part)}_settings", __base__=Section, **fields)
    model.section = section
    return model


def part_settings(section: str, part: str) -> dict[str, Any]:
    """Return the settings of a method or a link with their defaults; one without is None until it is given."""
    fields = MODELS[section](part).model_fields
    return {key: None if field.is_required() else field.default for key, field in fields.items()}


def refuse_unknown(
    section: str, settings: Iterable[str], part: str, elsewhere: Callable[[str], str] = lambda key: ""
) -> None:
    """Raise ValueError for a setting that the part does not have; `elsewhere` hints at keys of other sections."""
    known = MODELS[section](part).model_fields
    for key in settings:
        if key not in known:
            hint = nearest(key, [*known, *RESERVED[section]]) or elsewhere(f"{section}.{key}")
            options = ", ".join([*RESERVED[section][1:], *known]) or "none"
            raise ValueError(f"{section}.{key} is no setting of {names.label(part)}{hint}; its settings: {options}")


def checked_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a method, those not given filled in.

    Its constructor's own checks are run, save that our own methods are known to take their defaults: torch is not
    imported for these.

    Raises:
        ValueError: an unknown setting, or a value that cannot be used.
    """
    refuse_unknown("aggregator", settings, method)
    values = _filled(settings_model(method), settings)
    if names.is_builtin("aggregators", method) and values == aggregator_settings(method):
        return values
    try:
        build_aggregator(method, **values)
    except (Exception, SystemExit) as error:  # whatever somebody's constructor raises
        message = str(error) or type(error).__name__
        first = message.split(" ")[0]
        prefix = "" if first.startswith("aggregator.") else "aggregator." if first in values else "aggregator: "
        raise ValueError(f"{prefix}{message}") from None
    return values


def checked_link(link: str, noise: float, missing_rate: float, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a link, those not given filled in.

    Raises:
        ValueError: an unknown setting, a value that cannot be used, or noise that the link does not ask for.
    """
    refuse_unknown("channel", settings, link)
    check_levels(link, noise=noise, missing_rate=missing_rate)
    return _filled(link_model(link), settings)


def _filled(model: type[Section], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a model, read from text where they were written in a file."""
    as_written = any(isinstance(value, Written) for value in settings.values())
    return dict(model.read(settings) if as_written else model(**settings))
