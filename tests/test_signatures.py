"""What classes and functions can be told, asked or read from their text."""

from typing import Any, Literal

import pytest

from jgesr_lightning import names
from jgesr_lightning.signatures import REQUIRED, Argument, arguments, from_text


@pytest.mark.parametrize("name", names.BUILTIN["aggregators"])
def test_the_text_of_our_methods_tells_what_the_classes_do(name):
    text = from_text(names.BUILTIN["aggregators"][name])
    found = names.find("aggregators", name)
    assert text is not None, f"help and configurations would wait for torch: write {name}'s defaults as plain values"
    assert text.arguments == arguments(found)
    for constant in ("name", "min_clients", "mixing", "needs"):
        assert text.constants[constant] == getattr(found, constant)


def test_arguments_of_functions_and_classes():
    def function(first, second: int = 3, *, third: "float | None" = None, **more: str): ...

    class Some:
        def __init__(self, word: Literal["a", "b"] = "a", number: float = 1): ...

    assert arguments(function) == {
        "first": Argument(Any, REQUIRED),
        "second": Argument(int, 3),
        "third": Argument(float | None, None),
    }
    assert arguments(Some) == {"word": Argument(Literal["a", "b"], "a"), "number": Argument(float, 1)}


def test_annotations_that_cannot_be_had_are_anything():
    def function(first: "Nowhere" = 1): ...  # noqa: F821

    assert arguments(function) == {"first": Argument(Any, 1)}


@pytest.mark.parametrize(
    "target",
    [
        "jgesr_lightning.no_such_module:Class",
        "jgesr_lightning.names:NoClass",
        "jgesr_lightning.aggregators.base:Upload.x",
    ],
)
def test_texts_that_do_not_tell(target):
    assert from_text(target) is None
