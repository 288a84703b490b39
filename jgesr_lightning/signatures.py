"""What a class or function can be told: its arguments with their types and defaults.

Those of our own classes are read from their text, so that neither help nor a configuration has to wait for torch; what
the text does not tell, and everything from outside, is imported and asked.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

REQUIRED = inspect.Parameter.empty
_PLAIN = {"float": float, "int": int, "bool": bool, "str": str, "Literal": Literal, "tuple": tuple, "list": list}


class Argument(NamedTuple):
    """One argument that can be given by its name.

    Attributes:
        hint: its type; Any where none is written.
        default: its default, or `REQUIRED`.
    """

    hint: Any
    default: Any


def arguments(part: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments that a class's constructor, or a function, takes by name."""
    signature = inspect.signature(part)
    function = part.__init__ if isinstance(part, type) else part  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # an annotation that names what is only there for type checkers
        hints = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Argument(hints.get(name, Any), parameter.default)
        for name, parameter in signature.parameters.items()
        if parameter.kind in by_name
    }


class ClassText(NamedTuple):
    """What the text of a class tells.

    Attributes:
        arguments: of its constructor.
        constants: its class attributes that are plain values, those of its bases included.
    """

    arguments: dict[str, Argument]
    constants: dict[str, Any]


@functools.cache
def from_text(target: str) -> ClassText | None:
    """Return what the text of one of our classes tells, without importing it, or None where the text is not enough.

    Args:
        target: ``jgesr_lightning.module:Class``.
    """
    module, _, name = target.partition(":")
    classes, imported = _contents(module)
    if name not in classes:
        return None
    bases = [base for base in classes[name].bases if isinstance(base, ast.Name)]
    above = [f"{module}:{base.id}" if base.id in classes else imported.get(base.id, "") for base in bases]
    ours = [target for target in above if target.startswith("jgesr_lightning.")]
    inherited = from_text(ours[0]) if len(ours) == 1 else None if ours else ClassText({}, {})
    if inherited is None:
        return None
    found: dict[str, Argument] | None = inherited.arguments
    constants = dict(inherited.constants)
    if any("dataclass" in ast.unparse(decorator) for decorator in classes[name].decorator_list):
        fields = _fields(classes[name].body)
        found = None if fields is None else inherited.arguments | fields
    for item in classes[name].body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            found = _arguments(item.args)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            constants[item.target.id] = _literal(item.value)
    return None if found is None else ClassText(found, constants)


@functools.cache
def _contents(module: str) -> tuple[dict[str, ast.ClassDef], dict[str, str]]:
    """Return the classes in the text of a module of ours, and where the names come from that it imports."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return {}, {}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {item.asname or item.name: f"{node.module}:{item.name}" for node in imports for item in node.names}
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, imported


def _arguments(arguments: ast.arguments) -> dict[str, Argument] | None:
    if arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        return None
    positional = arguments.args[1:]
    without = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*without, *arguments.defaults, *arguments.kw_defaults]
    given = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return _all_told({argument.arg: _argument(argument.annotation, default) for argument, default in given})


def _fields(body: list[ast.stmt]) -> dict[str, Argument] | None:
    """Return the arguments that the fields of a dataclass are."""
    return _all_told(
        {
            item.target.id: _argument(item.annotation, item.value)
            for item in body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not ast.unparse(item.annotation).startswith("ClassVar")
        }
    )


def _argument(annotation: ast.expr | None, default: ast.expr | None) -> Argument | None:
    value = REQUIRED if default is None else _literal(default)
    if annotation is None or value is Ellipsis:
        return None
    try:
        hint = eval(compile(ast.Expression(annotation), "annotation", "eval"), {"__builtins__": {}, **_PLAIN})
    except (NameError, TypeError):  # a type of another file's
        return None
    return Argument(types.NoneType if hint is None else hint, value)


def _all_told(found: dict[str, Argument | None]) -> dict[str, Argument] | None:
    told = {name: argument for name, argument in found.items() if argument is not None}
    return told if len(told) == len(found) else None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; an ellipsis where it is none."""
    try:
        return ast.literal_eval(node)
    except ValueError:  # a constant's name, say
        return ...
