"""Fixtures that every area of the tests may use."""

import os
from pathlib import Path

import pytest

PLACES = (os.environ.get("JGESR_DATA"), Path(__file__).resolve().parents[2] / "shared" / "data")
MARKS = {"mnist": "MNIST/raw/train-images-idx3-ubyte", "cifar10": "cifar10.tgz"}


@pytest.fixture
def data_root():
    """Return a function: data set -> folder that holds it; where there is none the test is skipped, by name."""

    def find(name):
        for place in PLACES:
            if place and (Path(place) / MARKS[name]).exists():
                return Path(place)
        return pytest.skip(f"no {name} here: set JGESR_DATA to the folder that holds {MARKS[name]}")

    return find
