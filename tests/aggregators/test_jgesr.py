"""The jgesr aggregation: what it does with odd input, masks, layers, absent clients, and columns shared out."""

import math

import pytest
import torch

from jgesr_lightning.aggregators.jgesr import JGESR
from tests.aggregators.sharding import run_sharded

CLIENTS, SIZE, LAYERS = 6, 90, (40, 10, 0, 40)


def some_round(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    received = torch.randn(CLIENTS, SIZE, generator=generator, dtype=torch.float64) * 0.2 + 0.3
    weights = torch.rand(CLIENTS, generator=generator, dtype=torch.float64) + 0.1
    return received.to(dtype), weights


def valid(out):
    W = out.graph
    assert W.dtype == torch.float64
    assert torch.equal(W, W.T)
    assert float(W.min()) >= 0
    assert float(W.diagonal().abs().max()) == 0
    assert bool(torch.isfinite(W).all())
    assert bool(torch.isfinite(out.models).all())
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_types_memory_and_diagnostics(dtype, masked):
    received, weights = some_round(dtype)
    before = received.clone()
    mask = torch.rand(received.shape) > 0.2 if masked else None
    out = valid(JGESR()(received, weights, mask=mask))
    assert out.models.dtype == dtype
    assert out.models.data_ptr() != received.data_ptr()
    assert torch.equal(received, before)
    info = out.info
    assert len(info["objective"]) == info["iterations"] + 1
    assert info["converged"] is (info["reason"] == "converged")
    assert info["edges"] == int((out.graph > 0).sum()) // 2
    assert {"step_norm", "objective_rose", "rho", "fidelity", "seconds"} <= info.keys()
    for entry in info.values():
        assert type(entry) in (int, float, bool, str, list)


@pytest.mark.parametrize(
    ("case", "received"),
    [
        ("equal rows", torch.ones(4, 7)),
        ("all zero", torch.zeros(4, 7)),
        ("a zero row", torch.cat([torch.zeros(1, 7), torch.randn(3, 7)])),
        ("cosines all negative", torch.eye(4) - 0.25),
        ("two clients that oppose each other", torch.tensor([[1.0, 2.0], [-1.0, -2.0]])),
        ("one column", torch.tensor([[1.0], [2.0], [4.0]])),
    ],
)
@pytest.mark.parametrize("step", ["fixed", "backtracking"])
@pytest.mark.parametrize("masked", [False, True])
def test_odd_input_gives_a_proper_graph(case, received, step, masked):
    weights = 10.0 ** torch.arange(0, -2 * len(received), -2, dtype=torch.float64)  # of very different size
    mask = torch.ones_like(received, dtype=torch.bool) if masked else None
    out = valid(JGESR(step=step)(received, weights, mask=mask))
    assert float(out.graph.sum(1).min()) > 0, case
    assert all(math.isfinite(value) for value in out.info["objective"][1:])


def test_a_coordinate_nobody_delivered_starts_from_the_previous_models():
    received, weights = some_round()
    mask = torch.ones_like(received, dtype=torch.bool)
    mask[:, 7] = False
    previous = received + 1.0
    previous[:, 7] = 5.0  # the same for all: nothing to smooth, nothing to pull
    out = valid(JGESR()(torch.where(mask, received, math.nan), weights, mask=mask, previous=previous))
    torch.testing.assert_close(out.models[:, 7], previous[:, 7])
    without = valid(JGESR()(torch.where(mask, received, math.nan), weights, mask=mask))
    torch.testing.assert_close(without.models[:, 7], torch.zeros(CLIENTS, dtype=torch.float64))


def test_a_gap_takes_the_mean_of_those_who_delivered_without_previous_models():
    received, weights = some_round()
    mask = torch.ones_like(received, dtype=torch.bool)
    mask[2, 7] = False
    short = JGESR(max_iter=1, alpha=0.0)(received, weights, mask=mask)
    others = torch.tensor([0, 1, 3, 4, 5])
    mean = (weights[others] * received[others, 7]).sum() / weights[others].sum()
    assert float(short.models[2, 7]) == pytest.approx(float(mean), rel=1e-12)


@pytest.mark.parametrize("fidelity", ["shares", "scaled", "uniform"])
def test_fidelity_is_a_choice_of_weights(fidelity):
    received, weights = some_round()
    zeta = weights / weights.sum()
    z = {"shares": zeta, "scaled": CLIENTS * zeta, "uniform": torch.ones(CLIENTS, dtype=torch.float64)}[fidelity]
    out = JGESR(fidelity=fidelity, eps=1e-10, max_iter=5000)(received, weights)
    W = out.graph
    L = torch.diag(W.sum(1)) - W
    fixed_point = torch.linalg.solve(torch.diag(z) + 0.1 * L, torch.diag(z) @ received)
    torch.testing.assert_close(out.models, fixed_point, rtol=1e-6, atol=1e-7)
    assert out.info["fidelity"] == fidelity


def test_init_previous_starts_there():
    received, weights = some_round()
    first = JGESR(eps=1e-7, max_iter=5000)(received, weights)
    again = JGESR(eps=1e-7, max_iter=5000, init="previous")(received, weights, previous=first.models)
    assert again.info["iterations"] < first.info["iterations"]
    torch.testing.assert_close(again.models, first.models, rtol=1e-4, atol=1e-4)
    fallback = JGESR(init="previous")(received, weights)
    torch.testing.assert_close(fallback.models, JGESR()(received, weights).models)


@pytest.mark.parametrize("masked", [False, True])
def test_one_graph_a_layer(masked):
    received, weights = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(3)) > 0.2 if masked else None
    agg = JGESR(graph_scope="layer", eps=0.0, max_iter=40)
    out = valid(agg(received, weights, mask=mask, layers=LAYERS))
    assert out.layer_graphs.shape == (4, CLIENTS, CLIENTS)
    begin = 0
    for layer, width in enumerate(LAYERS):
        columns = slice(begin, begin + width)
        begin += width
        if width:
            part = None if mask is None else mask[:, columns]
            alone = JGESR(eps=0.0, max_iter=40)(received[:, columns], weights, mask=part)
            torch.testing.assert_close(out.models[:, columns], alone.models, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(out.layer_graphs[layer], alone.graph, rtol=1e-9, atol=1e-10)
    shares = torch.tensor(LAYERS, dtype=torch.float64) / SIZE
    torch.testing.assert_close(out.graph, (shares[:, None, None] * out.layer_graphs).sum(0))
    with pytest.raises(ValueError, match="layers"):
        agg(received, weights)


@pytest.mark.parametrize("bounds", [(0, 30, 90), (0, 45, 45, 90), (0, 40, 50, 90)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step": "backtracking"},
        {"accelerated": True},
        {"init": "previous"},
        {"graph_scope": "layer"},
        {"step": "backtracking", "rho": 1e-2},
    ],
)
def test_columns_shared_out_over_processes_change_nothing(bounds, masked, settings):
    received, weights = some_round()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(3)) > 0.2 if masked else None
    previous = received.flip(1)
    layers = LAYERS if settings.get("graph_scope") == "layer" else None
    settings = {"max_iter": 30, **settings}
    whole = JGESR(**settings)(received, weights, mask=mask, previous=previous, layers=layers)
    parts = run_sharded(
        lambda: JGESR(**settings), received, weights, mask=mask, previous=previous, layers=layers, bounds=bounds
    )
    torch.testing.assert_close(parts.models, whole.models, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.graph, whole.graph, rtol=1e-8, atol=1e-9)
    assert parts.info["iterations"] == whole.info["iterations"]
    assert parts.info["objective"] == pytest.approx(whole.info["objective"], rel=1e-9)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"alpha": -1}, "alpha"),
        ({"beta": 0}, "beta"),
        ({"gamma": math.nan}, "gamma"),
        ({"mu": 0}, "mu"),
        ({"rho": 0.0}, "rho"),
        ({"eps": -1e-3}, "eps"),
        ({"max_iter": 0}, "max_iter"),
        ({"fidelity": "share"}, "did you mean 'shares'"),
        ({"step": "armijo"}, "step"),
        ({"accelerated": "yes"}, "accelerated"),
        ({"init": "zero"}, "init"),
        ({"graph_scope": "block"}, "graph_scope"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ValueError, match=message):
        JGESR(**setting)


def test_not_finite_is_an_error_that_says_so():
    received, weights = some_round()
    received[1, 1] = math.inf
    with pytest.raises(ValueError, match="received"):
        JGESR()(received, weights)
