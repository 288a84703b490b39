import sys
from types import SimpleNamespace

import pytest
import torch

from jgesr_lightning.callbacks import progress
from jgesr_lightning.callbacks.progress import Progress
from jgesr_lightning.records import RoundRecord


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_estimate_counts_from_the_first_round_not_from_what_comes_before(clock, capsys):
    plan = SimpleNamespace(fabric=SimpleNamespace(is_global_zero=True), weights=torch.ones(3), rounds=5)
    shown, state = Progress(), SimpleNamespace(round=0)
    shown.on_federation_start(plan, state)
    clock.now += 60  # W&B starts, the first evaluation
    shown.on_round_end(plan, state, RoundRecord(0, {"accuracy/received": 0.1}), None)
    for number in (1, 2):
        shown.on_round_start(number, torch.empty(0))
        clock.now += 10
        shown.on_round_end(plan, state, RoundRecord(number), None)
    before, first, second = capsys.readouterr().err.splitlines()
    assert before == "round 0/5  accuracy received 10.00 %"
    assert first.startswith("round 1/5  not evaluated  10 s elapsed, 40 s left (ends about ")
    assert second == "round 2/5  not evaluated  20 s elapsed, 30 s left"


def test_who_imported_ipykernel_is_no_notebook_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not progress._in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not progress._in_notebook()
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    assert progress._in_notebook()
