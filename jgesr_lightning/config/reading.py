"""Text of YAML files and of ``key=value`` arguments, read as the types that the settings declare.

A scalar keeps its text until the declared type of its key is known, so that a name such as ``77950e8`` stays text,
``1e-3`` is a number although YAML 1.1 says otherwise, ``010`` is ten, and 1.5 never becomes 1 where a whole number is
meant. Every YAML file of the package is read here, by `read_yaml` into a model or, a run's, by `leaves`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml

from jgesr_lightning import names
from jgesr_lightning.checks import nearest
from jgesr_lightning.config.section import ConfigError, Section, expected, misfit

NULL = ("", "~", "null", "none")
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
MERGE = "tag:yaml.org,2002:merge"


class Setting:
    """A value as it was written, a scalar or a list of them, whose type is not known yet.

    Attributes:
        node: what was written.
        where: ``"file, line n"``; empty for a command line.
        folder: that of the file, which the names of files in it are relative to; None: the current one.
    """

    def __init__(self, node: yaml.Node, where: str = "", folder: Path | None = None) -> None:
        self.node, self.where, self.folder = node, where, folder

    def __str__(self) -> str:
        """Return the text as a command line takes it: ``0.1``, ``[a,b]``, ``null``."""
        if isinstance(self.node, yaml.SequenceNode):
            return f"[{','.join(str(Setting(item)) for item in self.node.value)}]"
        return names.resolve(str(self.node.value), self.folder) or "null"


Settings = dict[str, Setting]
"""Settings of a run inside another file: nested or dotted there, dotted keys here."""


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


def read_tree(path: Path) -> yaml.Node | None:
    """Return the node tree of a YAML file, None for an empty one; ConfigError, in one line, where it is not YAML."""
    try:
        return yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def pairs(node: yaml.Node, path: Path) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield (key, its node, value) of a mapping, with what ``<<`` merges in; a key that stands twice is an error."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{place(path, node)}: the file must hold key: value pairs")
    seen: dict[str, int] = {}
    merged: list[yaml.Node] = []
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{place(path, key)}: keys must be plain words")
        if key.tag == MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            continue
        if key.value in seen:
            raise ConfigError(f"{place(path, key)}: {key.value} stands twice (first in line {seen[key.value]})")
        seen[key.value] = key.start_mark.line + 1
        yield key.value, key, value
    for source in merged:
        if not isinstance(source, yaml.MappingNode):
            raise ConfigError(f"{place(path, source)}: << takes *anchor of key: value pairs")
        for name, key, value in pairs(source, path):
            if name not in seen:
                seen[name] = key.start_mark.line + 1
                yield name, key, value


def leaves(node: yaml.Node | None, is_section: Callable[[str], bool], path: Path) -> Iterator[tuple[str, yaml.Node]]:
    """Yield (dotted key, node) for each setting below `node`; a key that stands twice is an error.

    ``local: {lr: 1}`` and ``local.lr: 1`` are the same; a section left empty yields nothing.
    """
    seen: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
        for name, key_node, value in pairs(node, path):
            key = f"{prefix}{name}"
            if is_section(key) and isinstance(value, yaml.MappingNode):
                yield from walk(value, f"{key}.")
                continue
            if key in seen:
                raise ConfigError(f"{place(path, key_node)}: {key} stands twice (first in line {seen[key]})")
            seen[key] = key_node.start_mark.line + 1
            if not (is_section(key) and is_null(value)):
                yield key, value

    if node is not None and not is_null(node):
        yield from walk(node, "")


def place(path: Path, node: yaml.Node) -> str:
    """Return ``"file, line n"`` of a node."""
    return f"{path}, line {node.start_mark.line + 1}"


def argument(text: str) -> yaml.Node:
    """Return the node of a command-line value: a list where it is written ``[a,b]``, else the text as it stands."""
    if text.startswith("[") and text.endswith("]"):
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            node = None
        if isinstance(node, yaml.SequenceNode):
            return node
    return scalar(text)


def scalar(value: object) -> yaml.Node:
    """Return the node that stands for a plain value (None, bool, number, text, or a list of them)."""
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [scalar(item) for item in value])
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


def is_null(node: yaml.Node) -> bool:
    """Return whether a node is an unquoted null."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value.strip().lower() in NULL


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
    text: str = node.value
    if is_interpolation(text):
        return text
    for kind in kinds:
        for parse in _LOOKS_LIKE if kind is Any else (_PARSERS.get(kind, _word(kind)),):
            try:
                return parse(text)
            except ValueError:
                continue
    raise ValueError(misfit(key, text, kinds[0] if len(kinds) == 1 else hint))


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


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+(_\d+)*", text.strip(), re.ASCII):
        raise ValueError(text)
    return int(text)


def _decimal(text: str) -> float:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text.strip(), re.ASCII):
        raise ValueError(text)
    return float(text)


def _word_truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ValueError(text)
    return word in TRUE


def _word(kind: Any) -> Callable[[str], str]:
    def read(text: str) -> str:
        if get_origin(kind) is not Literal or text not in get_args(kind):
            raise ValueError(text)
        return text

    return read


_PARSERS: dict[Any, Callable[[str], Any]] = {bool: _truth, int: _whole, float: _decimal, str: str}
_LOOKS_LIKE: tuple[Callable[[str], Any], ...] = (_whole, _decimal, _word_truth, str)


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where it would otherwise read back as null, or with a line break changed."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = text.strip().lower() in NULL or not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def dump(values: dict[str, Any]) -> str:
    """Return YAML text that reads back as the same values, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
