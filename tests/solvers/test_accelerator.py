"""What runs on an accelerator, run on the CPU: tensors, nothing looked at inside a step, the host's results.

Under FakeTensorMode a tensor of device "cuda" has no values: to look at one, or to mix devices, is an error.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.aggregators.base import Upload
from jgesr_lightning.graph import arrays, filter_signals, learn_graph, pairwise_sq_distances, prox_log_degree
from jgesr_lightning.graph.arrays import blind
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.solvers import PDCA, Alternating, Models

CLIENTS, LAYERS = 8, (140, 20, 0, 140)
SIZE = sum(LAYERS)


def as_on_an_accelerator():
    """Treat the CPU as an accelerator for a while."""
    return mock.patch.object(arrays, "tensors_everywhere", True)


def some_round(seed=0, clients=CLIENTS):
    draw = torch.Generator().manual_seed(seed)
    groups = torch.randn(3, SIZE, dtype=torch.float64, generator=draw)[torch.arange(clients) % 3]
    received = 0.5 + 0.3 * groups + 0.1 * torch.randn(clients, SIZE, dtype=torch.float64, generator=draw)
    weights = torch.rand(clients, dtype=torch.float64, generator=draw) + 0.05
    return received, weights / weights.sum(), torch.rand(clients, SIZE, generator=draw) > 0.2


def assert_same(found, expected):
    torch.testing.assert_close(found.models, expected.models, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.graph, expected.graph, rtol=1e-10, atol=1e-10)
    for key in ("iterations", "reason", "backtracks", "restarts", "edges"):
        assert found.info.get(key) == expected.info.get(key), key
    if "objective" in expected.info:
        assert found.info["objective"] == pytest.approx(expected.info["objective"], rel=1e-10)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("jgesr", {}),
        ("jgesr", {"step": "backtracking", "rho": 1e-2}),
        ("jgesr", {"step": "backtracking", "accelerated": True}),
        ("jgesr", {"accelerated": True, "max_iter": 40}),
        ("jgesr", {"graph_scope": "layer", "max_iter": 33}),
        ("jgesr", {"rho": 1e-3}),  # diverges
        ("jgesr", {"stop": "stationarity", "eps": 0.05}),
        ("two_step", {}),
        ("two_step", {"graph_scope": "layer"}),
        ("graph_filter", {}),
    ],
)
def test_aggregations_give_what_the_host_gives(name, settings, missing):
    received, weights, mask = some_round()
    given = {"mask": mask if missing else None, "previous": received + 0.05, "layers": LAYERS}
    expected = build_aggregator(name, **settings)(received, weights, **given)
    with as_on_an_accelerator():
        found = build_aggregator(name, **settings)(received, weights, **given)
    assert_same(found, expected)


GROUPS = torch.tensor([0, 1, 0, 1, 0, 1, 0, 2])  # of whom one is alone


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("jgesr", {}), ("jgesr", {"graph_scope": "layer"}), ("two_step", {"max_iter": 2}), ("graph_filter", {})],
)
def test_groups_are_kept_apart_as_on_the_host(name, settings, missing):
    received, weights, mask = some_round()
    given = {"mask": mask if missing else None, "previous": received + 0.05, "layers": LAYERS}
    none = torch.zeros(CLIENTS, CLIENTS, dtype=torch.float64)

    def out():
        method = build_aggregator(name, groups=1.0, **settings)
        method.load_state({"grouping": {"groups": GROUPS, "cosines": none, "rounds": none}})
        return method(received, weights, **given)

    expected = out()
    with as_on_an_accelerator():
        found = out()
    for ours, theirs in ((found.models, expected.models), (found.graph, expected.graph)):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    across = GROUPS[:, None] != GROUPS
    assert 0 < float(found.graph[across].sum()) < 1e-4 * float(found.graph.sum())


@pytest.mark.parametrize("noise", [0.0, torch.ones(1, CLIENTS, CLIENTS, dtype=torch.float64)])
def test_what_a_problem_knows_of_pairs_lies_where_it_is_solved(noise):
    method = build_aggregator("jgesr", groups=1.0)
    method.grouping.groups = GROUPS
    received, weights, _ = some_round()
    upload = Upload(received, weights, None, received, None, torch.arange(CLIENTS), CLIENTS)
    there, here = (method.posed(upload, noise, torch.device(device)) for device in ("meta", "cpu"))
    for away, near in ((there.together, here.together), (there.noise, here.noise)):
        assert isinstance(near, float | np.ndarray)
        assert isinstance(away, float) or (blind(away) and away.device.type == "meta")


def test_functions_give_what_the_host_gives():
    received, weights, mask = some_round()
    D = pairwise_sq_distances(torch.stack([received, 2 * received]))
    theta = -0.05 * D

    def all_of_them():
        W = learn_graph(D, 0.05, 1.0, 1.0)
        return W, prox_log_degree(theta, 1.0, 1.0, 1.0), filter_signals(received, W[0], weights, 0.05, 1.0, mask=mask)

    expected = all_of_them()
    with as_on_an_accelerator():
        found = all_of_them()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("solver", [PDCA(backtracking=True, accelerated=True), PDCA(), Alternating(eps=1e-8)])
def test_problems_at_once_each_stop_by_themselves(accelerator, missing, solver):
    rounds = [some_round(seed) for seed in range(3)]
    received = torch.stack([r * (1 + 2 * k) for k, (r, _, _) in enumerate(rounds)])
    mask = torch.stack([m for *_, m in rounds]) if missing else None
    weights = rounds[0][1]
    alone = []
    for k in range(3):
        models = Models(Problem().pulled(received[k], weights, None if mask is None else mask[k]))
        (solution,) = solver.solve(models)
        alone.append((solution, models.result()))
    if accelerator:
        with as_on_an_accelerator():
            together = Models(Problem().pulled(received, weights, mask))
            solutions, result = solver.solve(together), together.result()
    else:
        together = Models(Problem().pulled(received, weights, mask))
        solutions, result = solver.solve(together), together.result()
    assert len({solution.iterations for solution in solutions}) > 1
    for k, (expected, models) in enumerate(alone):
        assert solutions[k].iterations == expected.iterations
        assert solutions[k].objective == pytest.approx(expected.objective, rel=1e-9)
        torch.testing.assert_close(result[k], models, rtol=1e-8, atol=1e-9)


def test_a_problem_whose_every_step_needs_care_stops_where_it_is_stationary():
    draw = torch.Generator().manual_seed(0)
    received, start = (torch.randn(6, 300, dtype=torch.float64, generator=draw) for _ in range(2))
    solver = PDCA(max_iter=60, stop="stationarity", eps=1e-4)
    with as_on_an_accelerator():
        problem = Problem(neighbours=2).pulled(1 + 2 * received, torch.ones(6, dtype=torch.float64))
        (solution,) = solver.solve(Models(problem, start=start))
    assert solution.converged
    assert max(solution.stationarity) < 1e-4


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("solver", [PDCA(), PDCA(backtracking=True, accelerated=True), PDCA(stop="stationarity")])
def test_nothing_is_looked_at_and_no_devices_meet_in_a_step(solver, grouped, missing):
    with FakeTensorMode(allow_non_fake_inputs=True):
        received = torch.randn(CLIENTS, 5000, device="cuda")
        mask = torch.rand(CLIENTS, 5000, device="cuda") > 0.1 if missing else None
        weights = torch.rand(CLIENTS, dtype=torch.float64, device="cuda")
        models = Models(Problem().pulled(received, weights, mask), previous=received)
        state = solver.init(models)
        if grouped:  # whose start, alone, is looked at
            together = torch.rand(CLIENTS, CLIENTS, dtype=torch.float64, device="cuda")
            models.problem = models.problem.but(together=together).scaled_to(state.D)
        for _ in range(3):
            state = solver.step(models, state)
        assert blind(state.W) and state.W.device.type == "cuda" and state.value.device.type == "cuda"
        assert models.result().device.type == "cuda"
        with pytest.raises(DataDependentOutputException):  # the guard itself works
            bool(state.W.sum() > 0)
