"""Checks of values that users give: one line that names the value and what would do."""

import math

import pytest

from jgesr_lightning.checks import SYNONYMS, flag, nearest, number, one_of, whole
from jgesr_lightning.config import KEYS


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("fedagv", ["local", "fedavg"], "fedavg"),
        ("FEDAVG", ["local", "fedavg"], "fedavg"),
        ("lenet", ["LeNet"], "LeNet"),
        ("learning_rate", ["local.momentum", "local.lr"], "local.lr"),
        ("learning_rate", ["learning_rates", "other"], "learning_rates"),  # what it looks like, where lr is not known
        ("received", ["accuracy/trained", "accuracy/received"], "accuracy/received"),
        ("zzz", ["local", "fedavg"], None),
        ("", ["local"], None),
    ],
)
def test_the_word_that_was_meant(word, known, meant):
    assert nearest(word, known) == (f" (did you mean {meant!r}?)" if meant else "")


def test_synonyms_lead_to_what_there_is():
    words = {"fedavg", "jgesr", "cifar10", "accuracy/received", "accuracy/trained"}
    words |= {"local.optimizer", "local.weight_decay", "local.schedule", "local.clip_norm"}
    assert set(SYNONYMS.values()) - set(KEYS) - words == set()
    assert not set(SYNONYMS) & {key for key in KEYS if "." not in key}  # a word that is a key means itself


@pytest.mark.parametrize(
    ("check", "value", "bounds", "reason"),
    [
        (number, True, {}, "must be a finite number"),
        (number, "1", {}, "must be a finite number"),
        (number, math.nan, {}, "must be a finite number"),
        (number, -1, {"at_least": 0}, "must be at least 0"),
        (number, 0, {"above": 0}, "must be above 0"),
        (number, 1.5, {"at_most": 1}, "must be at most 1"),
        (whole, 1.0, {}, "must be a whole number"),
        (whole, False, {}, "must be a whole number"),
        (whole, 1, {"at_least": 2}, "must be at least 2"),
        (flag, 1, {}, "must be true or false"),
    ],
)
def test_values_that_will_not_do(check, value, bounds, reason):
    with pytest.raises(ValueError, match=rf"^x is .*; it {reason}$"):
        check("x", value, **bounds)


def test_values_that_will_do():
    number("x", 1, at_least=1, at_most=1, above=0)
    whole("x", 0)
    flag("x", False)
    one_of("x", "a", ["a", "b"])


def test_a_word_that_is_not_known_lists_those_that_are():
    with pytest.raises(ValueError, match=r"^x is 'c'; known: aaaa, bbbb$"):
        one_of("x", "c", iter(["aaaa", "bbbb"]))
