"""The configuration of a run, read from YAML files with a base and from ``key=value`` arguments.

Later layers win: the defaults, the files named by ``base:``, the file, the arguments. Every key is known, typed and
checked before any work starts, and a wrong one is a `ConfigError` of one line.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jgesr_lightning import names
from jgesr_lightning.aggregators import aggregator_names, aggregator_settings
from jgesr_lightning.checks import nearest
from jgesr_lightning.config import nodes, reading
from jgesr_lightning.config.methods import method_settings, refuse_unknown, setting_types_of, settings_model
from jgesr_lightning.config.nodes import Setting
from jgesr_lightning.config.reading import located
from jgesr_lightning.config.schema import KEYS, SECTIONS, AggregatorConfig, Config
from jgesr_lightning.config.section import ConfigError
from jgesr_lightning.config.shipped import find_config, folders
from jgesr_lightning.paths import user_path

logger = logging.getLogger(__name__)

Layer = dict[str, Setting]


def load_config(
    path: str | Path | None, overrides: str | Iterable[str] = (), *, settings: Mapping[str, Setting] | None = None
) -> Config:
    """Return the checked configuration of a YAML file under overrides.

    Args:
        path: a YAML file, or the bare name of one in ``configs/`` (``mnist_s01``); None: the defaults alone.
        overrides: ``key=value`` or ``--key=value`` in any order, as several texts or as one, parted by blanks; the last
            of two for one key wins. Those of the key ``_wandb``, which W&B's agents may add, are passed over.
        settings: of another file (a study), one layer with the overrides, which win.

    Raises:
        ConfigError: anything wrong with the file, a key or a value, in one line.
    """
    if isinstance(overrides, Mapping):
        raise ConfigError(f"overrides are texts key=value, such as {'rounds=3'!r}, not a mapping")
    try:
        layer = {_known(key, setting.where): setting for key, setting in (settings or {}).items()}
        layer |= parse_overrides(shlex.split(overrides) if isinstance(overrides, str) else overrides)
        if path is None:
            return _merge([], layer, "run")
        path = find_config(path)
        return _merge(_file_layers(path), layer, path.stem)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{path or 'configuration'}: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(error) from None


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return the configuration of nested plain values, as `to_dict` gives them."""
    values = dict(values)
    if "aggregator" in values:
        settings = dict(values["aggregator"])
        name = settings.pop("name", AggregatorConfig.model_fields["name"].default)
        values["aggregator"] = {"name": name, "settings": settings}
    built: dict[str, Any] = {key: SECTIONS[key](**value) if key in SECTIONS else value for key, value in values.items()}
    return Config(**built)


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested plain values, the settings of the method beside its name."""
    values = config.model_dump()
    values["aggregator"] = {"name": config.aggregator.name, **config.aggregator.settings}
    values["logging"]["tags"] = list(config.logging.tags)
    return values


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's stored settings with those that it did not have yet, at their defaults: an older run's, say.

    A method from outside is not imported to complete its own.
    """
    filled: dict[str, Any] = {key: Config.model_fields[key].default for key in KEYS if "." not in key}
    filled |= {key: value for key, value in values.items() if key not in SECTIONS}
    for section, model in SECTIONS.items():
        known = {key: field.default for key, field in model.model_fields.items() if f"{section}.{key}" in KEYS}
        filled[section] = {**known, **(values.get(section) or {})}
    method = str(filled["aggregator"]["name"])
    if names.is_builtin("aggregators", method):
        filled["aggregator"] = {"name": method, **method_settings(method), **filled["aggregator"]}
    filled["logging"]["tags"] = list(filled["logging"]["tags"])
    return filled


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML text; `load_config` reads it back as an equal `Config`."""
    return nodes.dump(to_dict(config))


def _file_layers(path: Path, read: dict[Path, bool] | None = None) -> list[Layer]:
    """Return the layers of a file's bases, then its own; a file that several others build on is applied once, first."""
    read = {} if read is None else read  # False while a file's bases are being read, then True
    read[path.resolve()] = False
    layer: Layer = {}
    layers: list[Layer] = []
    entries = list(nodes.leaves(nodes.read_tree(path), SECTIONS.__contains__, path))
    if any(key.partition(".")[0] == "methods" for key, _ in entries):
        raise ConfigError(f"{path} is a study, not one run; it is run by: python -m jgesr_lightning study {path}")
    for key, node in entries:
        where = nodes.place(path, node)
        if key != "base":
            layer[_known(key, where)] = Setting(node, where, path.parent)
            continue
        bases = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for name in (reading.typed("base", entry, str) for entry in bases):
            base = path.parent / user_path(name)
            if not base.is_file() and name == Path(name).stem:  # a bare name: what is shipped, wherever this file lies
                base = next((file for place in folders() if (file := place / f"{name}.yaml").is_file()), base)
            if not base.is_file():
                options = [str(file.relative_to(path.parent)) for file in sorted(path.parent.glob("*.yaml"))]
                raise ConfigError(f"{where}: no base file {base}{nearest(name, options)}")
            if read.get(base.resolve()) is False:
                raise ConfigError(f"{where}: base {name} leads back to {base}, which builds on this file")
            if base.resolve() not in read:
                layers += _file_layers(base, read)
    read[path.resolve()] = True
    return [*layers, layer]


def parse_overrides(overrides: Iterable[str]) -> Layer:
    """Return the layer of ``key=value`` arguments."""
    layer: Layer = {}
    for override in overrides:
        key, equals, value = override.removeprefix("--").partition("=")
        if key == "_wandb" or key.startswith("_wandb."):
            continue
        if not equals or not key:
            raise ConfigError(f"{override!r} is no setting: write key=value, such as local.lr=0.05")
        layer[_known(key, "")] = Setting(nodes.argument(value))
    return layer


def _known(key: str, where: str) -> str:
    """Return `key` if it is one, a method's setting included; ConfigError with the nearest otherwise."""
    at = f"{where}: " if where else ""
    if key in KEYS or (key.startswith("aggregator.") and key.count(".") == 1 and not key.endswith(".")):
        return key
    if key in SECTIONS:
        keys = [known for known in KEYS if known.startswith(f"{key}.")]
        more = " and the method's settings" if key == "aggregator" else ""
        raise ConfigError(f"{at}{key} is a section; give its keys: {', '.join(keys)}{more}")
    if key == "base":
        raise ConfigError("base belongs into a file")
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    same = [known for known in KEYS if known.rpartition(".")[2] == leaf]
    close = nearest(leaf, KEYS, synonyms_only=True) or nearest(key, [*KEYS, *SECTIONS])
    moved = bool(same) and (section == leaf or section in SECTIONS)  # a misspelt word comes before one from elsewhere
    if not same and not close and leaf in set().union(*map(aggregator_settings, aggregator_names())):
        same = [f"aggregator.{leaf}"]
    hint = f" (did you mean {same[0]!r}?)" if moved or (same and not close) else close
    tops = [known for known in KEYS if "." not in known]
    known = f"; known: {', '.join([*tops, *(f'{section}.*' for section in SECTIONS)])}" if not hint else ""
    raise ConfigError(f"{at}unknown key {key!r}{hint}{known}")


def _merge(files: Sequence[Layer], overrides: Layer, stem: str) -> Config:
    """Merge the layers over the defaults, fill in ``${...}``, and check the result."""
    values: dict[str, Any] = {"name": None}
    for key in KEYS.keys() - values.keys():
        section, _, leaf = key.rpartition(".")
        values[key] = (SECTIONS[section] if section else Config).model_fields[leaf].default
    places: dict[str, str] = {}
    settings: Layer = {}
    try:
        for layer in (*files, overrides):
            places |= {key: entry.where for key, entry in layer.items()}
            before = str(values["aggregator.name"])
            values |= {key: _value(key, entry, KEYS[key]) for key, entry in layer.items() if key in KEYS}
            after = str(values["aggregator.name"])
            own = {key.removeprefix("aggregator."): entry for key, entry in layer.items() if key not in KEYS}
            settings = {**_carried(settings, before, after), **own}
            refuse_unknown(settings, after)
        hints = KEYS | setting_types_of(after)
        for leaf, field in settings_model(after).model_fields.items():
            key = f"aggregator.{leaf}"
            if leaf in settings:
                values[key] = _value(key, settings[leaf], hints[key])
            elif not field.is_required():
                values[key] = field.default
        named = values["name"] is not None
        if not named:
            values["name"] = stem
        _interpolate(values, hints)
        config = from_dict(_nested(values))
    except ValueError as error:
        raise ConfigError(located(str(error), places)) from None
    if not named:
        config.model_fields_set.discard("name")
    return config


def _value(key: str, entry: Setting, hint: Any) -> Any:
    value = reading.typed(key, entry.node, hint)
    return names.resolve(value, entry.folder) if key in names.KEYS.values() and isinstance(value, str) else value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    return nested


def _interpolate(values: dict[str, Any], hints: Mapping[str, Any]) -> None:
    """Replace every ``${...}`` by what it stands for, read as the type of its key."""
    texts = {key: value for key, value in values.items() if reading.is_interpolation(value)}
    if not texts:
        return
    tree = OmegaConf.create(_nested({key: value for key, value in values.items() if key not in texts}))
    for key, text in texts.items():
        try:
            OmegaConf.update(tree, key, text)
        except OmegaConfBaseException:
            raise ValueError(f"{key} is {text!r}; ${{...}} is not closed, or holds no key") from None
    for key, text in texts.items():
        try:
            found = OmegaConf.select(tree, key)
            found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException as error:
            raise ValueError(f"{key} is {text!r}; {str(error).splitlines()[0]}") from None
        if isinstance(found, dict) or reading.is_interpolation(found):
            raise ValueError(f"{key} is {text!r}; this gives {found!r}, which is no value")
        values[key] = _value(key, Setting(nodes.scalar(found)), hints[key])


def _carried(settings: Layer, before: str, after: str) -> Layer:
    """Return the settings of one method that hold for another that takes its place in a later layer.

    A setting is carried over where both methods have it with the same default, and so the same meaning; the others
    belong to the method that was left. What is dropped although it had been changed is named in a note.
    """
    if before == after or not settings:
        return settings
    old, new, hints = method_settings(before), method_settings(after), setting_types_of(before)
    kept = {leaf: entry for leaf, entry in settings.items() if leaf in new and new[leaf] == old[leaf]}
    values = {
        leaf: _value(f"aggregator.{leaf}", entry, hints[f"aggregator.{leaf}"]) for leaf, entry in settings.items()
    }

    def changed(leaves: Iterable[str]) -> str:
        return ", ".join(f"{leaf}={values[leaf]}" for leaf in leaves if values[leaf] != old[leaf])

    dropped = [leaf for leaf in settings if leaf not in kept]
    if changed(dropped):
        source, still = settings[dropped[0]].where.partition(", line")[0], changed(kept)
        logger.warning(
            "aggregator.name=%s: settings of %s from %s not used: %s%s",
            after,
            before,
            source,
            changed(dropped),
            f"; kept: {still}" if still else "",
        )
    return kept
