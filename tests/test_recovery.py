"""Scores of graphs against known groups: cases counted by hand, and pair by pair."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jgesr_lightning.config import load_config
from jgesr_lightning.experiment import run
from jgesr_lightning.measures import edge_scores
from tests.federations import small_federation


def test_ends():
    groups = [0, 1, 0, 1]
    right = torch.tensor([[float(i != j and (i - j) % 2 == 0) for j in range(4)] for i in range(4)])
    assert set(edge_scores(right, groups).values()) == {1.0}
    assert set(edge_scores(1 - right - torch.eye(4), groups).values()) == {0.0}
    everyone = edge_scores(torch.full((4, 4), 0.25), groups)
    assert everyone == {"graph/precision": 1 / 3, "graph/recall": 1.0, "graph/within": pytest.approx(1 / 3)}
    nobody = edge_scores(torch.eye(4), groups)
    assert nobody["graph/recall"] == 0
    assert math.isnan(nobody["graph/precision"]) and math.isnan(nobody["graph/within"])
    assert math.isnan(edge_scores(right, [0, 1, 2, 3])["graph/recall"])


@given(st.integers(2, 6), st.integers(0, 10_000))
def test_pair_by_pair(clients, seed):
    draw = torch.Generator().manual_seed(seed)
    graph = torch.rand(clients, clients, generator=draw) * (torch.rand(clients, clients, generator=draw) > 0.6)
    groups = torch.randint(0, 3, (clients,), generator=draw).tolist()
    pairs = [(i, j) for i in range(clients) for j in range(i)]
    edges = [(i, j) for i, j in pairs if graph[i, j] > 0 or graph[j, i] > 0]
    within = [(i, j) for i, j in pairs if groups[i] == groups[j]]
    both = [pair for pair in edges if pair in within]
    found = edge_scores(graph, groups)
    for name, part, whole in (
        ("precision", len(both), len(edges)),
        ("recall", len(both), len(within)),
        ("within", sum(float(graph[p] + graph[p[::-1]]) for p in both),
         sum(float(graph[p] + graph[p[::-1]]) for p in edges)),
    ):  # fmt: skip
        score = found[f"graph/{name}"]
        assert score == pytest.approx(part / whole) if whole else math.isnan(score)


def test_rounds_are_scored_where_groups_are_known():
    federation = small_federation(rounds=2, groups=[0, 1, 0, 1])
    state = federation.fresh_state()
    federation.run(state)
    assert state.records[2].metrics["graph/precision"] == pytest.approx(1 / 3)  # fedavg joins all
    assert "graph/precision" not in state.records[0].metrics


def test_a_run_with_planted_groups_has_the_scores_in_its_files(tmp_path):
    common = ["data.name=synthetic", "data.fraction=0.1", "clients=4", "rounds=1", "local.epochs=1", "data.kappa=10",
              "runtime.devices=1", "logging.wandb=false", "aggregator.name=cfl", f"output_dir={tmp_path}"]  # fmt: skip
    planted = run(load_config("mnist_quick", [*common, "data.planted=labels", "data.groups=2", "name=planted"]))
    plain = run(load_config("mnist_quick", [*common, "name=plain"]))
    assert planted.metrics["graph/precision"].iloc[-1] == pytest.approx(1 / 3)  # one cluster: all pairs
    assert planted.metrics["graph/recall"].iloc[-1] == 1
    assert not [name for name in plain.metrics.columns if name.startswith("graph/")]
