"""The settings of an aggregation method: one model, built from the signature of the method's constructor."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

from pydantic import create_model

from jgesr_lightning import names
from jgesr_lightning.aggregators import aggregator_settings, build_aggregator, of_a_function, setting_types
from jgesr_lightning.checks import nearest
from jgesr_lightning.config.section import Section
from jgesr_lightning.config.written import Written
from jgesr_lightning.signatures import REQUIRED


@functools.cache
def settings_model(method: str) -> type[Section]:
    """Return the model of a method's settings, with the types and defaults of its constructor's arguments."""
    types = setting_types(method)
    fields: dict[str, Any] = {}
    for key, default in aggregator_settings(method).items():
        if key == "name" or key.startswith(("_", "model_")):
            raise ValueError(f"aggregator.name is {method!r}; its setting {key} must be called otherwise")
        if not isinstance(default, (str, int, float, tuple, list, type(None))) and default is not REQUIRED:
            raise ValueError(f"aggregator.name is {method!r}; the default of its setting {key} cannot stand in a file")
        fields[key] = (types[key], ... if default is REQUIRED else default)
    with warnings.catch_warnings(action="ignore"):  # a setting may be called `copy`, say
        model: type[Section] = create_model(f"{names.label(method)}_settings", __base__=Section, **fields)
    model.section = "aggregator"
    if any(field.is_required() for field in model.model_fields.values()):
        model.absent = of_a_function(method)
    return model


def method_settings(method: str) -> dict[str, Any]:
    """Return the settings of a method with their defaults; one without a default is None until it is given."""
    fields = settings_model(method).model_fields
    return {key: None if field.is_required() else field.default for key, field in fields.items()}


def refuse_unknown(settings: Iterable[str], method: str) -> None:
    """Raise ValueError for a setting that the method does not have."""
    known = settings_model(method).model_fields
    for key in settings:
        if key not in known:
            name, options = names.label(method), ", ".join(known) or "none"
            raise ValueError(
                f"aggregator.{key} is no setting of {name}{nearest(key, [*known, 'name'])}; its settings: {options}"
            )


def checked_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a method, those not given filled in.

    Its constructor's own checks are run, save that our own methods are known to take their defaults: torch is not
    imported for these.

    Raises:
        ValueError: an unknown setting, or a value that cannot be used.
    """
    refuse_unknown(settings, method)
    model = settings_model(method)
    as_written = any(isinstance(value, Written) for value in settings.values())
    values = dict(model.read(settings) if as_written else model(**settings))
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
