"""Text of YAML files and of ``key=value`` arguments, as nodes: keys, values as they were written, and their places.

A scalar keeps its text until the declared type of its key is known (see `jgesr_lightning.config.reading`). ``<<`` is
merged as YAML does, a key that stands twice is an error, and so is, in one line, all that is not YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from jgesr_lightning import names
from jgesr_lightning.config.section import ConfigError

NULL = ("", "~", "null", "none")
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


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where it would otherwise read back as null, or with a line break changed."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = text.strip().lower() in NULL or not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def dump(values: dict[str, Any]) -> str:
    """Return YAML text that reads back as the same values, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
