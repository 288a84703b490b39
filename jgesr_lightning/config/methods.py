"""The settings of an aggregation method: one model, built from the signature of the method's constructor."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import create_model

from jgesr_lightning.checks import nearest, one_of
from jgesr_lightning.config.section import Section


@functools.cache
def settings_model(method: str) -> type[Section]:
    """Return the model of a method's settings, with the types and defaults of its constructor's arguments."""
    from jgesr_lightning.aggregators import aggregator_names, aggregator_settings, setting_types

    one_of("aggregator.name", method, aggregator_names())
    types = setting_types(method)
    fields: dict[str, Any] = {key: (types[key], default) for key, default in aggregator_settings(method).items()}
    model: type[Section] = create_model(f"{method}_settings", __base__=Section, **fields)
    model.section = "aggregator"
    return model


def method_settings(method: str) -> dict[str, Any]:
    """Return the settings of a method with their defaults."""
    return {key: field.default for key, field in settings_model(method).model_fields.items()}


def setting_types_of(method: str) -> dict[str, Any]:
    """Return the settings of a method, dotted, with their types."""
    return {f"aggregator.{key}": field.annotation for key, field in settings_model(method).model_fields.items()}


def refuse_unknown(settings: Any, method: str) -> None:
    """Raise ValueError for a setting that the method does not have."""
    known = settings_model(method).model_fields
    for key in settings:
        if key not in known:
            options = ", ".join(known) or "none"
            raise ValueError(
                f"aggregator.{key} is no setting of {method}{nearest(key, known)}; its settings: {options}"
            )


def checked_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a method, those not given filled in; its constructor's own checks are run.

    Raises:
        ValueError: an unknown setting, or a value that cannot be used.
    """
    from jgesr_lightning.aggregators import build_aggregator

    refuse_unknown(settings, method)
    values = dict(settings_model(method)(**settings))
    try:
        build_aggregator(method, **values)
    except (TypeError, ValueError) as error:
        message = str(error)
        raise ValueError(f"aggregator{'.' if message.split(' ')[0] in values else ': '}{message}") from None
    return values


def min_clients(method: str) -> int:
    """Return the number of clients below which a method cannot work."""
    from jgesr_lightning.aggregators import aggregator_class

    return aggregator_class(method).min_clients
