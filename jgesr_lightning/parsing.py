"""Text of configuration files and of ``key=value`` arguments, read as the types that the settings declare.

A scalar keeps its text until the declared type of its key is known, so that a name such as ``77950e8`` stays text,
``1e-3`` is a number although YAML 1.1 says otherwise, and 1.5 never becomes 1 where a whole number is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml

NULL = ("", "~", "null", "none")
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
TEXTS = tuple[str, ...]
ANY = Any
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", TEXTS: "a list such as [a,b]"}


def read_tree(path: Path) -> yaml.Node | None:
    """Return the node tree of a YAML file, None for an empty one; ValueError, in one line, where it is not YAML."""
    try:
        return yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None


def leaves(node: yaml.Node | None, is_section: Callable[[str], bool], path: Path) -> Iterator[tuple[str, yaml.Node]]:
    """Yield (dotted key, node) for each setting below `node`; a key that stands twice is a ValueError.

    ``local: {lr: 1}`` and ``local.lr: 1`` are the same; a section left empty yields nothing.
    """
    seen: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{place(path, node)}: the file must hold key: value pairs")
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"{place(path, key_node)}: keys must be plain words")
            key = f"{prefix}{key_node.value}"
            if is_section(key) and isinstance(value, yaml.MappingNode):
                yield from walk(value, f"{key}.")
                continue
            if key in seen:
                raise ValueError(f"{place(path, key_node)}: {key} stands twice (first in line {seen[key]})")
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
        except yaml.YAMLError:
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


def typed(key: str, node: yaml.Node, hint: Any) -> Any:
    """Return a node's value as the type `hint` declares; text with ``${...}`` is returned as it stands.

    Args:
        key: dotted name of the setting, for the message.
        node: what was written.
        hint: bool, int, float, str, ``tuple[str, ...]``, a union of these and None, or `ANY` for what it looks like.

    Raises:
        ValueError: what was written is no such value; one line with the key, the text and what is expected.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = NoneType in kinds or hint is ANY
    if isinstance(node, yaml.SequenceNode):
        if TEXTS in kinds or hint is ANY:
            item = str if TEXTS in kinds else ANY
            return tuple(typed(f"{key}[{place}]", entry, item) for place, entry in enumerate(node.value))
        raise ValueError(f"{key} is a list; it must be {_expected(kinds)}")
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{key} holds keys of its own; it must be {_expected(kinds)}")
    if optional and is_null(node):
        return None
    text: str = node.value
    if is_interpolation(text):
        return text
    parsers: list[Callable[[str], Any]] = [_PARSERS[kind] for kind in kinds if kind in _PARSERS]
    if hint is ANY:
        parsers = [_whole, _decimal, _word_truth, str]
    for parse in parsers:
        try:
            return parse(text)
        except ValueError:
            continue
    raise ValueError(f"{key} is {text!r}; it must be {_expected(kinds)}")


def _expected(kinds: tuple[Any, ...]) -> str:
    words = [WORDS[kind] for kind in kinds if kind in WORDS] or ["a number, a word or a list"]
    return " or ".join([*words, *(["null"] if NoneType in kinds else [])])


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


_PARSERS: dict[Any, Callable[[str], Any]] = {bool: _truth, int: _whole, float: _decimal, str: str}


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where it would otherwise read back as null, or with a line break changed."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = text.strip().lower() in NULL or not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def dump(values: dict[str, Any]) -> str:
    """Return YAML text that reads back as the same values, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
