"""A section of settings: a frozen model that checks itself, and says in one line what is wrong with a value.

Called from Python its types are exact: 1.5 is no whole number, and "5" none either. What was written in a file is read
as the type that is declared: a name such as ``77950e8`` stays text, ``1e-3`` is a number although YAML 1.1 says
otherwise, ``010`` is ten, ``no`` is text where text is due.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from jgesr_lightning.checks import nearest
from jgesr_lightning.config.error import ConfigError
from jgesr_lightning.config.written import Items, Text, places, read_tree

STORED = "stored"
"""Context of what is read back from a run: it was checked when it was given, and parts of one's own may be gone."""

FLOAT32 = (1.18e-38, 3.4e38)  # models and most of what is computed with them have 32 bits
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "string_pattern_mismatch": "text that is not blank",
    "list": "a list such as [a,b]",
    "tuple": "a list such as [a,b]",
    "dict": "key: value pairs",
    "model": "key: value pairs",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "finite_number": "a finite number",
    "float32": "0 or between {least:g} and {most:g}, which 32 bits hold",
}
"""Kind of a mistake, or its first word, as pydantic names it: what must stand there instead."""

_SPAN = re.compile(r"\s*[-+]?[0_]+[-+]")  # pydantic reads 0-2, meant as a span, as -2
NUMBER: TypeAdapter[int | float] = TypeAdapter(int | float, config=ConfigDict(allow_inf_nan=False))


class Section(BaseModel):
    """Base of the sections: keys are known, values have their type and stay.

    A key is one line, ``lr: float = Field(0.01, gt=0)``, with what it means below it; what takes more than bounds is a
    validator that raises ValueError with what would do, such as "it must be ..."; one of the whole model names its key.

    Class attributes:
        section: the section's own name, which messages put before its keys; empty at the top of a file.
        absent: what a message says behind a key that is missing.

    Raises:
        ConfigError: a value that cannot be used, with its key and what would do.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True,
        protected_namespaces=(),
    )  # fmt: skip
    section: ClassVar[str] = ""
    absent: ClassVar[str] = ""

    if not TYPE_CHECKING:  # for type checkers, the signature is that of the fields

        def __init__(self, **values: Any) -> None:
            with _one_line(type(self), values):
                super().__init__(**values)

        __init__.__pydantic_base_init__ = True  # or pydantic would call it for each section inside another

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Self:
        """Return the section of what was written, text read as the types of its keys."""
        with _one_line(cls, tree):
            return cls.model_validate(tree, strict=False)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Self:
        """Return the section of values that a run has kept; parts of one's own are not imported for it.

        Whoever needs such a part checks the section that names it by `replace`.
        """
        with _one_line(cls, values):
            return cls.model_validate(values, context=STORED)

    @field_validator("*", mode="before")
    @classmethod
    def _left_empty(cls, value: Any, info: ValidationInfo) -> Any:
        hint = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, Text) and value.is_null:
            if NoneType in get_args(hint):
                return None
            if dict in (get_origin(kind) for kind in (hint, *get_args(hint))):
                return {}
        texts = value if isinstance(value, Items) else [value]
        if str in (hint, *get_args(hint)) and any(isinstance(text, Text) and text.is_null for text in texts):
            raise ValueError("it must be text that is not blank; null, none and ~ are text in quotes alone")
        if any(isinstance(text, Text) and _SPAN.match(text) for text in texts):
            kinds = list(_kinds(hint))
            if int in kinds and str not in kinds:
                raise ValueError(f"it must be {EXPECTED['float' if float in kinds else 'int']}")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not FLOAT32[0] <= abs(value) <= FLOAT32[1]:
            raise PydanticCustomError("float32", "beyond 32 bits", dict(zip(("least", "most"), FLOAT32, strict=True)))
        if isinstance(value, float):
            return value + 0.0  # one zero: -0.0 would be another condition, under another name
        return looks_like(value)  # under no declared type it is still as it was written

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse: a section is frozen."""
        raise ConfigError(f"{name} cannot be set, a configuration is frozen; replace({name}=...) gives a checked copy")

    def __delattr__(self, name: str) -> None:
        """Refuse: a section is frozen."""
        raise ConfigError(f"{name} cannot be deleted, a configuration is frozen")

    def replace(self, **values: Any) -> Self:
        """Return a copy with some values changed, checked like any other; what was not given is not so in the copy."""
        copy = type(self)(**{**dict(self), **values})
        copy.model_fields_set.intersection_update(self.model_fields_set | values.keys())
        return copy


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
    """Return a YAML file as a model, each value read as the type of its field.

    Raises:
        ConfigError: one line with the file, the line, the key, the value and what would do.
    """
    tree = read_tree(path)
    return Read(model.read(tree), dict(places(tree)))


def _kinds(hint: Any) -> Iterator[Any]:
    """Yield a type and all that stands in it."""
    yield hint
    for part in get_args(hint):
        yield from _kinds(part)


def looks_like(value: Any) -> Any:
    """Return a value as it was written as what it looks like: null, a number, true or false, text, or a tuple of them.

    >>> looks_like(Items([Text("1e-3"), Text("true"), Text("null"), Text("on")]))
    (0.001, True, None, 'on')
    """
    if isinstance(value, Items):
        return tuple(map(looks_like, value))
    if not isinstance(value, Text):
        return value
    if not _SPAN.match(value):
        with contextlib.suppress(ValidationError):
            return NUMBER.validate_python(value)
    return None if value.is_null else {"true": True, "false": False}.get(value.strip().lower(), str(value))


def located(message: str, where: Mapping[str, str]) -> str:
    """Return the message with the place where its key, the first word or that called unknown, was written."""
    key = message.removeprefix("unknown key ").split(" ", 1)[0].rstrip(";")
    place = where.get(key, where.get("", ""))
    return f"{message} ({place})" if place and place.partition(",")[0] not in message else message


@contextlib.contextmanager
def _one_line(model: type[Section], values: Mapping[str, Any]) -> Iterator[None]:
    """Raise what pydantic found wrong as a ConfigError."""
    try:
        yield
    except ValidationError as error:
        wrong = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # unknown keys first
        found = [(*_key_and_value(each, model.section, values), each) for each in wrong]
        first = found[0][0]
        within = [each for each in found if each[0] == first or each[0].startswith((f"{first}.", f"{first}["))]
        key, value, _ = max(within, key=lambda each: len(each[0]))  # of several types, the one that fits best
        line = _complaint(model, key, value, [each for name, _, each in found if name == key])
        raise ConfigError(located(line, dict(places(values, model.section)))) from None


def _key_and_value(error: ErrorDetails, key: str, value: Any) -> tuple[str, Any]:
    """Return the dotted key that something is wrong with, and what stands there."""
    for part in error["loc"]:
        if isinstance(part, int):
            key, value = f"{key}[{part}]", value[part]
        elif isinstance(value, Mapping) and (part in value or error["type"] == "missing"):  # else a type of several
            key, value = f"{key}.{part}" if key else part, value.get(part)
    return key, value


def _complaint(model: type[Section], key: str, value: Any, errors: Sequence[ErrorDetails]) -> str:
    """Return the line that says what is wrong with a value; there is an error for each type that it may have."""
    kind, context = errors[0]["type"], errors[0].get("ctx", {})
    declared: Any = model
    for part in errors[0]["loc"]:
        declared = declared.model_fields[part].annotation if part in getattr(declared, "model_fields", ()) else declared
    if kind == "missing":
        return f"{key} is missing{model.absent}"
    if kind == "extra_forbidden":
        known = list(declared.model_fields)
        return f"unknown key {key}{nearest(key.rpartition('.')[2], known)}; known: {', '.join(known)}"
    if kind == "value_error":  # a validator of ours
        reason = str(context["error"])
        whole = isinstance(value, (Mapping, BaseModel)) or reason.startswith(key)
        return reason if whole else f"{key} is {value!r}; {reason}"
    limit = next((limit for limit in context.values() if isinstance(limit, (int, float))), None)
    if isinstance(value, list):
        head = f"{key} is a list"
    elif isinstance(value, Mapping):
        head = f"{key} holds keys of its own"
    else:
        head = f"{key} is {value if limit is None else type(limit)(value)!r}"  # the number that is out of bounds
    known = [word for each in errors for word in re.findall("'(.*?)'", each.get("ctx", {}).get("expected", ""))]
    due = [_expected(each) for each in errors if each["type"] != "literal_error"]
    due = list(dict.fromkeys([*due, *known, *(["null"] if NoneType in get_args(declared) else [])]))
    choice = f"one of: {', '.join(due)}" if kind == "literal_error" else " or ".join(due)
    return f"{head}{nearest(str(value), known)}; it must be {choice}"


def _expected(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    text = EXPECTED.get(kind, EXPECTED.get(kind.partition("_")[0], "another value")).format(**context)
    limits = [limit for limit in context.values() if isinstance(limit, (int, float))]
    return f"{EXPECTED[type(limits[0]).__name__]}, {text}" if limits else text
