"""Fixtures that every area of the tests may use."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

PLACES = (os.environ.get("JGESR_DATA"), Path(__file__).resolve().parents[2] / "shared" / "data")
MARKS = {"mnist": "MNIST/raw/train-images-idx3-ubyte", "cifar10": "cifar10.tgz"}

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background inherits deaf ears for it
settings.register_profile("repeatable", derandomize=True, deadline=None)  # new examples: --hypothesis-profile=default
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let a test draw the same numbers whichever tests this process ran before it."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keep the tests of a file that starts processes together, as they share them; any other test runs anywhere."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("processes"):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def data_root():
    """Return a function: data set -> folder that holds it; where there is none the test is skipped, by name."""

    def find(name):
        for place in PLACES:
            if place and (Path(place) / MARKS[name]).exists():
                return Path(place)
        return pytest.skip(f"no {name} here: set JGESR_DATA to the folder that holds {MARKS[name]}")

    return find
