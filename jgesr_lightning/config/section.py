"""A section of settings: a frozen model that checks itself, and says in one line what is wrong with a value."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from jgesr_lightning.checks import nearest

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
FLOAT32 = (1.18e-38, 3.4e38)  # models and most of what is computed with them have 32 bits
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line that names the key, the value and what would do."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


class Section(BaseModel):
    """Base of the sections: types are exact (1.5 is no whole number, "5" none either), keys are known, values stay.

    A key is one line, ``lr: float = Field(0.01, gt=0, description="learning rate")``; what takes more than bounds is a
    validator that raises ValueError with what would do, such as "it must be ..."; one of the whole model names its key.

    Class attributes:
        section: the section's own name, which messages put before its keys; empty at the top of a file.

    Raises:
        ConfigError: a value that cannot be used, with its key and what would do.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )
    section: ClassVar[str] = ""

    if not TYPE_CHECKING:  # for type checkers, the signature is that of the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_complaint(type(self), error, values)) from None
            for key, value in self.__dict__.items():
                if isinstance(value, float) and value and not FLOAT32[0] <= abs(value) <= FLOAT32[1]:
                    words = "0 or a number that 32 bits hold, between {:g} and {:g}".format(*FLOAT32)
                    raise ConfigError(f"{dotted(type(self), key)} is {value!r}; it must be {words}")

    def replace(self, **values: Any) -> Self:
        """Return a copy with some values changed, checked like any other."""
        return type(self)(**{**dict(self), **values})


def dotted(model: type[BaseModel], key: str) -> str:
    """Return a key with the name of its section before it."""
    section: str = getattr(model, "section", "")
    return f"{section}.{key}" if section else key


def misfit(key: str, value: object, hint: Any, bounds: Any = ()) -> str:
    """Return the line that says what a key must be instead of `value`, from its declared type and bounds."""
    if get_origin(hint) is Literal:
        known = get_args(hint)
        return f"{key} is {value!r}{nearest(str(value), known)}; it must be one of: {', '.join(map(str, known))}"
    return f"{key} is {value!r}; it must be {expected(hint, bounds)}"


def expected(hint: Any, bounds: Any = ()) -> str:
    """Return a declared type in words.

    >>> expected(int | None)
    'a whole number or null'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expected(arguments[0], [*getattr(arguments[1], "metadata", ()), *arguments[1:], *bounds])
    if origin in (Union, UnionType):
        each = [expected(kind, () if kind is NoneType else bounds) for kind in arguments]
        return " or ".join(
            f"{kind} ({limits})" if comma else kind for kind, comma, limits in (k.partition(", ") for k in each)
        )
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if (origin or hint) in (tuple, list):
        return "a list such as [a,b]"
    if (origin or hint) is dict or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return "key: value pairs"
    limits = [
        f"{word} {getattr(bound, name):g}" for name, word in BOUNDS.items() for bound in bounds if hasattr(bound, name)
    ]
    if any(getattr(bound, "pattern", None) for bound in bounds):
        limits = ["not blank"]
    return f"{KINDS.get(hint, 'a number, a word or a list')}{', ' if limits else ''}{' and '.join(limits)}"


def _complaint(model: type[Section], error: ValidationError, values: dict[str, Any]) -> str:
    """Return the first of pydantic's errors in our words."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    key = dotted(model, name)
    if first["type"] == "value_error":  # a validator of ours
        reason = str(first["ctx"]["error"])
        return f"{key} is {values[name]!r}; {reason}" if name and not reason.startswith(key) else reason
    if first["type"] == "extra_forbidden":
        fields = model.model_fields
        return f"unknown key {key!r}{nearest(name, fields)}; known: {', '.join(fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "finite_number":
        return f"{key} is {values[name]!r}; it must be a finite number"
    field = model.model_fields[name]
    return misfit(key, values[name], field.annotation, field.metadata)
