"""What stands in YAML files and in ``key=value`` arguments: text as it was written, lists and pairs, with their places.

Text stays text until a key's declared type is known (see `jgesr_lightning.config.section`). ``<<`` is merged as YAML
does, a key that stands twice is an error, and so is, in one line, all that is not YAML.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import yaml
from pydantic import BeforeValidator, ValidationInfo

from jgesr_lightning import names
from jgesr_lightning.config.error import ConfigError

NULL = ("", "~", "null", "none")
MERGE = "tag:yaml.org,2002:merge"


class Written:
    """A value as it was written.

    Attributes:
        where: ``"file, line n"``; empty for a command line.
        folder: that of the file, which the names of files in it are relative to; None: the current one.
    """

    where: str = ""
    folder: Path | None = None


class Text(Written, str):
    """A scalar; `quoted` text is never null."""

    quoted = False

    @property
    def is_null(self) -> bool:
        """Whether this stands for no value, where one may be missing."""
        return not self.quoted and self.strip().lower() in NULL

    def resolved(self) -> Text:
        """Return the text with the path of a file that holds a part in full."""
        text = Text(names.resolve(self, self.folder))
        text.where, text.folder, text.quoted = self.where, self.folder, self.quoted
        return text


class Items(Written, list[Any]):
    """A list."""


class Pairs(Written, dict[str, Any]):
    """A mapping, with what ``<<`` merges in."""


Setting = Text | Items
"""A value whose type is not known yet."""

if TYPE_CHECKING:
    Settings = dict[str, Setting]
else:
    Settings = Annotated[dict[str, Any], BeforeValidator(lambda value, info: _settings(value, info))]
"""Settings of a run inside another file: nested or dotted there, dotted keys here."""


def read_tree(path: Path) -> Pairs:
    """Return what a YAML file holds; ConfigError, in one line, where it is not key: value pairs."""
    try:
        tree = _value(yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader), path)
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
    if isinstance(tree, Text) and tree.is_null:
        return Pairs()
    if not isinstance(tree, Pairs):
        raise ConfigError(f"{tree.where}: the file must hold key: value pairs")
    return tree


def argument(text: str) -> Setting:
    """Return a command-line value: a list where it is written ``[a,b]``, else the text as it stands.

    What would be read as something else is text in double quotes, as in a file: ``""``, ``"null"``, ``"[a]"``.
    """
    found: object = None
    if text[:1] == text[-1:] == '"':
        with contextlib.suppress(ValueError):
            found = json.loads(text)
        if isinstance(found, str) and _needs_quotes(found):
            quoted = Text(found)
            quoted.quoted = True
            return quoted
    if text.startswith("[") and text.endswith("]"):
        with contextlib.suppress(yaml.YAMLError, ConfigError, RecursionError):
            found = _value(yaml.compose(text, Loader=yaml.SafeLoader), None)
    return found if isinstance(found, Items) else Text(text)


def as_argument(value: Setting) -> str:
    """Return the text of a value as a command line takes it: ``0.1``, ``[a,b]``, ``null``."""
    if isinstance(value, Items):
        return f"[{','.join(map(_as_item, value))}]"
    if value.is_null:
        return "null"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if _needs_quotes(text) else text


def _needs_quotes(text: str) -> bool:
    """Return whether an argument that is this text would be read as something else."""
    return text.strip().lower() in NULL or text[:1] + text[-1:] in ("[]", '""')


def _as_item(value: object) -> str:
    """Return an item of a list: in quotes where a comma, say, would make another list of it."""
    if not isinstance(value, Text):
        return as_argument(value) if isinstance(value, Items) else json.dumps(value, ensure_ascii=False)
    if value.is_null:
        return "null"
    text = str(value)
    back = argument(f"[{text}]")
    return text if back == [text] and not back[0].is_null else json.dumps(text, ensure_ascii=False)


def written(value: object, where: str = "") -> Any:
    """Return a plain value (None, bool, number, text, or a list or mapping of them) as if it had been written."""
    found: Written
    if isinstance(value, (list, tuple)):
        found = Items(written(item, where) for item in value)
    elif isinstance(value, Mapping):
        found = Pairs({key: written(item, where) for key, item in value.items()})
    else:
        found = Text("null" if value is None else str(value).lower() if isinstance(value, bool) else str(value))
    found.where = where
    return found


def dotted(tree: Pairs, sections: Container[str] | None = None) -> dict[str, Any]:
    """Return dotted key -> value for each setting of a file; a key that stands twice is an error.

    ``local: {lr: 1}`` and ``local.lr: 1`` are the same; a section left empty holds nothing.

    Args:
        tree: the file, or a part of it.
        sections: the keys that hold keys; None: any may.
    """
    found: dict[str, Any] = {}
    for key, value in _leaves(tree, sections):
        if key in found:
            raise _twice(key, value.where, found[key])
        found[key] = value
    return found


def _leaves(tree: Pairs, sections: Container[str] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Pairs) and (sections is None or key in sections):
            yield from _leaves(value, sections, f"{key}.")
        elif not (isinstance(value, Text) and value.is_null and sections is not None and key in sections):
            yield key, value


def places(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, ``"file, line n"``) of a value and all below it; ``seeds[2]`` in a list."""
    if isinstance(value, Written):
        yield key, value.where
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from places(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from places(item, f"{key}[{at}]")


def dump(values: dict[str, Any]) -> str:
    """Return YAML text that reads back as the same values, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def _value(node: yaml.Node | None, path: Path | None, key: yaml.Node | None = None) -> Any:
    """Return what a node holds; a value stands where its key does."""
    value: Any
    if isinstance(node, yaml.ScalarNode):
        value = Text(node.value)
        value.quoted = node.style is not None
    elif isinstance(node, yaml.SequenceNode):
        value = Items(_value(item, path) for item in node.value)
    else:
        value = _pairs(node, path)
    if node is not None and path is not None:
        value.where, value.folder = _place(key or node, path), path.parent
    return value


def _pairs(node: yaml.Node | None, path: Path | None) -> Pairs:
    pairs = Pairs()
    merged: list[yaml.Node] = []
    for key, value in node.value if node is not None else ():
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{_place(key, path)}: keys must be plain words")
        if key.tag == MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        elif key.value in pairs:
            raise _twice(key.value, _place(key, path), pairs[key.value])
        else:
            pairs[key.value] = _value(value, path, key)
    for source in merged:
        if not isinstance(source, yaml.MappingNode):
            raise ConfigError(f"{_place(source, path)}: << takes *anchor of key: value pairs")
        for name, value in _pairs(source, path).items():
            pairs.setdefault(name, value)
    return pairs


def _place(node: yaml.Node, path: Path | None) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _twice(key: str, where: str, first: Written) -> ConfigError:
    return ConfigError(f"{where}: {key} stands twice (first in {first.where.rpartition(', ')[2]})")


def _settings(tree: object, info: ValidationInfo) -> object:
    if isinstance(tree, Text) and tree.is_null:
        return {}
    if not isinstance(tree, Pairs):
        return tree
    found = dotted(tree)
    for key, value in found.items():
        if isinstance(value, Items) and not all(isinstance(item, Text) for item in value):
            raise ValueError(f"{info.field_name}.{key} must be a number, a word or a list of them ({value.where})")
    return found


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where it would otherwise read back as null, or with a line break changed."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = text.strip().lower() in NULL or not text.isprintable()
    return cast(yaml.Node, dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None))


_Dumper.add_representer(str, _text)
