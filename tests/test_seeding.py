import contextlib
import itertools
import os

import pytest
import torch

from jgesr_lightning import seeding

PURPOSES = (
    seeding.INIT,
    seeding.PARTITION,
    seeding.BATCHES,
    seeding.CHANNEL,
    seeding.PARTICIPATION,
    seeding.DROPOUT,
    seeding.SUBSET,
)


def test_derived_seed_never_changes_between_versions():
    # An experiment that is repeated next year must see the same noise.
    assert seeding.derive(0, seeding.CHANNEL) == 1881562734316012349
    assert seeding.derive(3, seeding.BATCHES, 7, 19) == 2417995541736121157


def test_all_four_arguments_count_and_no_two_streams_meet():
    keys = list(itertools.product((0, 1, 2, 11), PURPOSES, range(12), range(12)))
    seeds = {seeding.derive(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_digits_of_neighbouring_arguments_are_not_run_together():
    assert seeding.derive(1, "x", 1, 11) != seeding.derive(1, "x", 11, 1)
    assert seeding.derive(1, "x", 2, 3) != seeding.derive(12, "x", 2, 3)


def test_generator_depends_on_its_key_alone():
    first = torch.rand(5, generator=seeding.generator(1, seeding.CHANNEL, 2, 3))
    torch.rand(100)
    torch.manual_seed(99)
    assert torch.equal(torch.rand(5, generator=seeding.generator(1, seeding.CHANNEL, 2, 3)), first)
    assert not torch.equal(torch.rand(5, generator=seeding.generator(1, seeding.CHANNEL, 2, 4)), first)


def test_generator_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.rand(4, generator=seeding.generator(0, seeding.INIT))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("set_before", [None, ":16:8", ""])
def test_a_variable_that_a_run_sets_is_as_before_after_it(monkeypatch, set_before):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if set_before is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", set_before)
    with contextlib.suppress(KeyError), seeding.deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (set_before or ":4096:8")
        raise KeyError
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == set_before


def test_deterministic_algorithms_are_on_for_a_run_alone():
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    with contextlib.suppress(KeyError), seeding.deterministic(True):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        raise KeyError
    assert (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark) == before
    with seeding.deterministic(False):
        assert (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark) == before
