"""What was written, read as the types that the settings declare; every YAML file of the package is read here.

A name such as ``77950e8`` stays text, ``1e-3`` is a number although YAML 1.1 says otherwise, ``010`` is ten, ``no`` is
text where text is due, and 1.5 never becomes 1 where a whole number is meant.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml

from jgesr_lightning.checks import nearest
from jgesr_lightning.config.nodes import Setting, Settings, is_null, leaves, pairs, place, read_tree
from jgesr_lightning.config.section import ConfigError, Section, expected, misfit

TRUE = ("true", "yes", "on", "1")
FORMS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: (r"[+-]?\d+(_\d+)*", int),
    float: (r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", float),
    bool: (r"(?i)true|yes|on|1|false|no|off|0", lambda text: text.strip().lower() in TRUE),
    "word": (r"(?i)true|false", lambda text: text.strip().lower() in TRUE),
    str: (r"(?s).*", str),
}
"""Type: the texts that have it, and how they are read."""

LOOKS_LIKE = (int, float, "word", str)
"""What a value of no declared type is tried as."""

M = TypeVar("M", bound=Section)


class Read(NamedTuple, Generic[M]):
    """What a file holds.

    Attributes:
        values: the checked model.
        places: dotted key (``seeds[2]`` in a list) -> ``"file, line n"``.
    """

    values: M
    places: dict[str, str]


def read_yaml(path: Path, model: type[M]) -> Read[M]:
    """Return a YAML file as a model, each value read as the type of its field; see `typed` for the types.

    Raises:
        ConfigError: one line with the file, the line, the key, the value and what would do.
    """
    places: dict[str, str] = {}
    node = read_tree(path)
    node = yaml.MappingNode("", []) if node is None or is_null(node) else node
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{place(path, node)}: the file must hold key: value pairs")
    try:
        return Read(typed("", node, model, path, places), places)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(located(str(error), places, str(path))) from None


def located(message: str, places: Mapping[str, str], otherwise: str = "") -> str:
    """Return the message with the place where its key, the first word, was written."""
    key = message.split(" ", 1)[0]
    where = places.get(key, otherwise)
    return message if not where or str(where) in message else f"{message} ({where})"


def is_interpolation(value: object) -> bool:
    """Return whether a value, or an item of a list, holds ``${...}`` and so has no final value yet."""
    if isinstance(value, (list, tuple)):
        return any(is_interpolation(item) for item in value)
    return isinstance(value, str) and "${" in value


def typed(key: str, node: yaml.Node, hint: Any, path: Path | None = None, places: dict[str, str] | None = None) -> Any:
    """Return a node's value as the type `hint` declares; text with ``${...}`` is returned as it stands.

    Args:
        key: dotted name of the setting, for the message.
        node: what was written.
        hint: bool, int, float, str, a Literal of words, a tuple or list of one of these, ``dict[str, ...]``, a
            `Section`, `Settings`, a union of any of them and None, or Any for what it looks like.
        path: the file that holds the node.
        places: filled with the place of each key, where given.

    Raises:
        ValueError: what was written is no such value; one line with the key, the text and what is expected.
    """
    if path is not None and places is not None and node.start_mark:
        places[key] = place(path, node)
    kinds = [_bare(kind) for kind in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (_bare(hint),))]
    if (NoneType in kinds or Any in kinds) and is_null(node):
        return None
    for kind in kinds:
        origin = get_origin(kind) or kind
        if isinstance(node, yaml.SequenceNode) and (origin in (tuple, list) or kind is Any):
            item = get_args(kind)[0] if get_args(kind) else Any
            found = [typed(f"{key}[{at}]", entry, item, path, places) for at, entry in enumerate(node.value)]
            return found if origin is list else tuple(found)
        if isinstance(node, yaml.MappingNode) and path is not None:
            if kind == Settings:
                return _settings(key, node, path)
            if origin is dict:
                of = get_args(kind)[1]
                return {
                    name: typed(f"{key}.{name}" if key else name, value, of, path, places)
                    for name, _, value in pairs(node, path)
                }
            if isinstance(kind, type) and issubclass(kind, Section):
                return _section(key, node, kind, path, places)
    words = expected(hint)
    if isinstance(node, yaml.SequenceNode):
        raise ValueError(f"{key} is a list; it must be {words}")
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{key} holds keys of its own; it must be {words}")
    if is_null(node) and dict in {get_origin(kind) for kind in kinds}:  # a section left empty
        return {}
    if is_interpolation(node.value):
        return node.value
    for kind in LOOKS_LIKE if Any in kinds else kinds:
        with contextlib.suppress(ValueError):
            return _scalar(node.value, kind)
    raise ValueError(misfit(key, node.value, kinds[0] if len(kinds) == 1 else hint))


def _scalar(text: str, kind: Any) -> Any:
    """Return text as one of the plain types or words; ValueError where it has another form."""
    if get_origin(kind) is Literal and text in get_args(kind):
        return text
    form, read = FORMS.get(kind, ("(?!)", str))  # the one that nothing has
    if not re.fullmatch(form, text if kind is str else text.strip(), re.ASCII):
        raise ValueError(text)
    return read(text)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _settings(key: str, node: yaml.Node, path: Path) -> Settings:
    found: Settings = {}
    for name, value in leaves(node, lambda _: True, path):
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise ValueError(f"{place(path, value)}: {key}.{name} must be a number, a word or a list of them")
        found[name] = Setting(value, place(path, value), path.parent)
    return found


def _section(key: str, node: yaml.Node, model: type[Section], path: Path, places: dict[str, str] | None) -> Section:
    values, prefix = {}, f"{key}." if key else ""
    for name, key_node, value in pairs(node, path):
        field = model.model_fields.get(name)
        if field is None:
            known = list(model.model_fields)
            at = place(path, key_node)
            raise ConfigError(f"{at}: unknown key {prefix}{name}{nearest(name, known)}; known: {', '.join(known)}")
        values[name] = typed(f"{prefix}{name}", value, field.annotation, path, places)
    try:
        return model(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None
