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

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jgesr_lightning import names
from jgesr_lightning.aggregators import aggregator_names, aggregator_settings
from jgesr_lightning.checks import nearest
from jgesr_lightning.config.error import ConfigError
from jgesr_lightning.config.methods import MODELS, part_settings, refuse_unknown
from jgesr_lightning.config.schema import KEYS, SECTIONS, Config
from jgesr_lightning.config.section import located, looks_like
from jgesr_lightning.config.shipped import find_config, folders, study_error
from jgesr_lightning.config.written import Items, Setting, Text, argument, dotted, dump, read_tree, written
from jgesr_lightning.paths import PathError, user_path

logger = logging.getLogger(__name__)

Layer = dict[str, Setting]
"""Dotted key -> value as it was written."""


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
    places: dict[str, str] = {}
    try:
        last = _layer(settings or {})
        last |= parse_overrides(_parted(overrides) if isinstance(overrides, str) else overrides)
        path = None if path is None else find_config(path)
        layers = [*([] if path is None else _file_layers(path, {})), last]
        places |= {key: value.where for layer in layers for key, value in layer.items()}
        return _merge(layers, "run" if path is None else path.stem)
    except ValueError as error:
        raise ConfigError(located(str(error), places)) from None


def _parted(overrides: str) -> list[str]:
    try:
        return shlex.split(overrides)
    except ValueError as error:
        raise ConfigError(f"overrides are {overrides!r}; {error}") from None


def parse_overrides(overrides: Iterable[str]) -> Layer:
    """Return the layer of ``key=value`` arguments."""
    layer: Layer = {}
    for override in overrides:
        key, equals, value = override.removeprefix("--").partition("=")
        if key == "_wandb" or key.startswith("_wandb."):
            continue
        if not equals or not key:
            raise ConfigError(f"{override!r} is no setting: write key=value, such as local.lr=0.05")
        layer[key] = argument(value)
    return _layer(layer)


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested plain values, the settings of the method beside its name; ``Config(**values)`` takes them back."""
    values = config.model_dump()
    values["logging"]["tags"] = list(config.logging.tags)
    return values


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML text; `load_config` reads it back as an equal `Config`."""
    return dump(to_dict(config))


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's stored settings with those that it did not have yet, at their defaults: an older run's, say.

    A method from outside is not imported to complete its own.
    """
    filled = to_dict(Config())
    method = str((values.get("aggregator") or filled["aggregator"])["name"])
    own = part_settings("aggregator", method) if names.is_builtin("aggregators", method) else {}
    filled["aggregator"] = {"name": method, **own}
    for key, value in values.items():
        filled[key] = {**filled[key], **(value or {})} if key in SECTIONS else value
    filled["logging"]["tags"] = list(filled["logging"]["tags"])
    return filled


def _file_layers(path: Path, read: dict[Path, bool]) -> list[Layer]:
    """Return the layers of a file's bases, then its own.

    Args:
        path: the file.
        read: the files met so far, False while their bases are being read: one that several build on counts once.
    """
    read[path.resolve()] = False
    values = dotted(read_tree(path), SECTIONS)
    if any(key.partition(".")[0] == "methods" for key in values):
        raise study_error(path)
    bases = values.pop("base", Items())
    layers: list[Layer] = []
    for name in bases if isinstance(bases, Items) else [bases]:
        base = _base(name, path)
        if read.get(base.resolve()) is False:
            raise ConfigError(f"{name.where}: base {name} leads back to {base}, which builds on this file")
        if base.resolve() not in read:
            layers += _file_layers(base, read)
    read[path.resolve()] = True
    return [*layers, _layer(values)]


def _base(name: Setting, path: Path) -> Path:
    """Return the base file of that name: one beside the file, or for a bare name one that is shipped."""
    if not isinstance(name, Text) or name.is_null:
        raise ConfigError(f"{name.where}: base must be the name of a file, or a list of such")
    try:
        base = path.parent / user_path(name)
    except PathError as error:
        raise ConfigError(f"{name.where}: base {error}") from None
    if not base.is_file() and name == Path(name).stem:
        base = next((file for place in folders() if (file := place / f"{name}.yaml").is_file()), base)
    if not base.is_file():
        options = [str(file.relative_to(path.parent)) for file in sorted(path.parent.glob("*.yaml"))]
        raise ConfigError(f"{name.where}: no base file {base}{nearest(name, options)}")
    return base


def _layer(settings: Mapping[str, Setting]) -> Layer:
    """Return the settings, their keys checked, with the paths of files that hold parts in full."""
    for key, value in settings.items():
        _check_key(key, value.where)
    return in_full(settings)


def in_full(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return settings with the paths of files that hold parts in full: they are relative to the file that says so."""
    parts = names.KEYS.values()
    return {
        key: value.resolved() if key in parts and isinstance(value, Text) else value for key, value in settings.items()
    }


def _check_key(key: str, where: str) -> None:
    """Raise ConfigError for a key that there is not; a setting of a method's or a link's own may have any name."""
    at = f"{where}: " if where else ""
    section, _, leaf = key.rpartition(".")
    if key in KEYS or (section in MODELS and leaf):
        return
    if key in SECTIONS:
        keys = [known for known in KEYS if known.startswith(f"{key}.")]
        more = f" and the settings of what {key}.name says" if key in MODELS else ""
        raise ConfigError(f"{at}{key} is a section; give its keys: {', '.join(keys)}{more}")
    if key == "base":
        raise ConfigError("base belongs into a file")
    hint = _elsewhere(key) or nearest(key, [*KEYS, *SECTIONS])
    tops = [known for known in KEYS if "." not in known]
    known = f"; known: {', '.join([*tops, *(f'{section}.*' for section in SECTIONS)])}" if not hint else ""
    raise ConfigError(f"{at}unknown key {key!r}{hint}{known}")


def _elsewhere(key: str) -> str:
    """Return a hint at the key that is meant by a wrong one: what others call it, or in another section."""
    leaf = key.rpartition(".")[2]
    elsewhere = [known for known in KEYS if known.rpartition(".")[2] == leaf]
    both = ""
    setting = f"aggregator.{leaf}"
    if key != setting and leaf in set().union(*map(aggregator_settings, aggregator_names())):
        both = f" (did you mean {elsewhere[0]!r} or {setting!r}?)" if elsewhere else ""
        elsewhere.append(setting)
    return (
        nearest(key, KEYS, cutoff=1.0) or nearest(leaf, KEYS, cutoff=1.0) or both or nearest(key, elsewhere, cutoff=0.0)
    )


def _merge(layers: Sequence[Layer], stem: str) -> Config:
    """Merge the layers, fill in ``${...}``, and check the result."""
    given = {key: value for layer in layers for key, value in layer.items() if key in KEYS}
    parts = {section: str(given.get(f"{section}.name", _default(section))) for section in MODELS}
    for section, part in parts.items():
        own = _own_settings(section, layers, part)
        given |= {f"{section}.{key}": value for key, value in own.items()}
    name = given.get("name")
    named = not (name is None or (isinstance(name, Text) and name.is_null))
    config = Config.read(_nested(_interpolated(given if named else given | {"name": Text(stem)}, parts)))
    if not named:
        config.model_fields_set.discard("name")
    return config


def _default(section: str) -> str:
    """Return the part that a section names by default."""
    return str(getattr(Config(), section).name)


def _own_settings(section: str, layers: Sequence[Layer], last: str) -> Layer:
    """Return the settings of the part that a section names in the `last` of its layers; see `_carried`."""
    settings, part = Layer(), _default(section)
    for layer in layers:
        before, part = part, str(layer.get(f"{section}.name", part))
        settings = _carried(section, settings, before, part)
        for key, value in layer.items():
            if key.startswith(f"{section}.") and key not in KEYS:
                settings[key.removeprefix(f"{section}.")] = value
        if part == last or not _is_gone(section, part):  # unless another one takes its place
            refuse_unknown(section, settings, part, _elsewhere)
    return settings


def _is_gone(section: str, part: str) -> bool:
    """Whether nothing can be asked for the settings of a part: its file was moved, say."""
    try:
        part_settings(section, part)
    except ValueError:
        return True
    return False


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    return nested


def _interpolated(given: Layer, parts: Mapping[str, str]) -> Layer:
    """Return the settings with what each ``${...}`` stands for in its place, defaults included."""
    if not any("${" in str(value) for value in given.values()):
        return given
    tree = OmegaConf.create(completed({key: {"name": part, **part_settings(key, part)} for key, part in parts.items()}))
    filled = dict(given)
    key = ""
    try:
        for key, value in given.items():
            OmegaConf.update(tree, key, [*map(str, value)] if isinstance(value, Items) else str(value))
        for key in given:
            if "${" in str(given[key]):
                found = OmegaConf.select(tree, key)
                found = OmegaConf.to_object(found) if OmegaConf.is_config(found) else found
                filled[key] = written(found, given[key].where)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"{key} is {str(given[key])!r}; {str(error).splitlines()[0]}") from None
    return filled


def _carried(section: str, settings: Layer, before: str, after: str) -> Layer:
    """Return the settings of one method (or link) that hold for another that takes its place in a later layer.

    A setting is carried over where both have it with the same default, and so the same meaning; the others belong to
    the one that was left. What is dropped although it had been changed is named in a note.
    """
    if before == after or _is_gone(section, after):
        return settings
    new = part_settings(section, after)
    old = new if _is_gone(section, before) else part_settings(section, before)
    kept = {key: value for key, value in settings.items() if key in new and new[key] == old[key]}
    changed = {
        key: looks_like(value) for key, value in settings.items() if key not in old or looks_like(value) != old[key]
    }
    dropped = [f"{key}={value}" for key, value in changed.items() if key not in kept]
    if dropped:
        source = next(settings[key].where.partition(", line")[0] for key in changed if key not in kept)
        still = ", ".join(f"{key}={value}" for key, value in changed.items() if key in kept)
        unused, rest = ", ".join(dropped), f"; kept: {still}" if still else ""
        told = f"{section}.name={after}: settings of {before} from {source} not used: {unused}{rest}"
        logger.warning(told)
    return kept
