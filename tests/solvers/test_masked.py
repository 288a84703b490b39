"""Signals with gaps: columns of common patterns in K x K and the others in d-space are one and the same iteration."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jgesr_lightning.graph import laplacian
from jgesr_lightning.graph.problem import Problem, Pull
from jgesr_lightning.solvers import PDCA, Alternating, Models, Solution, models
from jgesr_lightning.solvers.coefficients import Coefficients, common_patterns
from jgesr_lightning.solvers.columns import Columns
from tests.solvers.reference import pdca_as_printed
from tests.solvers.test_pdca import PROBLEM, federation, posed

NONE = 10**9
LAYERS = (140, 20, 0, 140)


def gaps(received: torch.Tensor, rate: float = 0.2) -> torch.Tensor:
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > rate
    mask[:, [3, 150, 299]] = False  # nobody delivered these
    return mask


def held(least: int | None, layers: tuple[int, ...] = (300,), dtype: torch.dtype = torch.float64, **extra: object):
    received, z = federation()
    mask = gaps(received)
    noise = torch.where(mask, received, torch.full_like(received, math.nan)).to(dtype)
    return Models(posed(noise, z, mask), layers, least=least, **extra), received, mask, z  # type: ignore[arg-type]


def parts(signals: Models) -> list[type]:
    return [type(part) for group in signals._groups for part in group]


@pytest.mark.parametrize(("least", "kinds"), [(1, [Coefficients]), (8, [Coefficients, Columns]), (NONE, [Columns])])
@pytest.mark.parametrize("with_previous", [True, False])
@pytest.mark.parametrize("with_start", [True, False])
def test_every_split_agrees_with_the_algorithm_as_printed(least, kinds, with_previous, with_start) -> None:
    received, z = federation()
    mask = gaps(received)
    previous = received + 0.05 if with_previous else None
    start = received.flip(1) if with_start else None
    signals, *_ = held(least, previous=previous, start=start)
    assert parts(signals) == kinds
    (solution,) = PDCA(max_iter=400).solve(signals)
    if start is None:
        shares = torch.from_numpy(z)[:, None] * mask
        mean = torch.where(mask.any(0), (shares * received).sum(0) / shares.sum(0).clamp_min(1e-300), 0)
        start = torch.where(mask, received, mean if previous is None else previous)
    known = torch.where(mask, received, 0)
    expected, W, trace = pdca_as_printed(known, torch.from_numpy(z), mask, problem=PROBLEM, max_iter=400, start=start)
    assert solution.iterations == len(trace) - 1 > 10
    torch.testing.assert_close(signals.result(), expected, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(solution.graphs[0], W.numpy(), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(solution.objective, trace, rtol=1e-9)


def solved(least: int | None, layers: tuple[int, ...], dtype: torch.dtype, **settings: object):
    signals, _, _, _z = held(least, layers, dtype)
    (solution,) = PDCA(**settings).solve(signals)  # type: ignore[arg-type]
    return signals.result(), solution


@pytest.mark.parametrize("settings", [{}, {"backtracking": True}, {"accelerated": True},
                                      {"backtracking": True, "accelerated": True}])  # fmt: skip
@pytest.mark.parametrize("layers", [(300,), LAYERS])
@pytest.mark.parametrize("least", [1, 8])
def test_patterns_and_columns_take_the_same_steps(settings, layers, least) -> None:
    together, first = solved(least, layers, torch.float64, max_iter=60, **settings)
    apart, second = solved(NONE, layers, torch.float64, max_iter=60, **settings)
    assert (first.iterations, first.reason, first.rho) == (second.iterations, second.reason, second.rho)
    assert (first.backtracks, first.restarts) == (second.backtracks, second.restarts)
    torch.testing.assert_close(together, apart, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(first.graphs, second.graphs, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(first.objective, second.objective, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_types(dtype) -> None:
    together, first = solved(8, (300,), dtype, max_iter=30, eps=0.0)
    apart, second = solved(NONE, (300,), dtype, max_iter=30, eps=0.0)
    assert together.dtype == apart.dtype == dtype
    torch.testing.assert_close(together, apart, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    np.testing.assert_allclose(first.graphs, second.graphs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("least", [1, 8, NONE])
def test_the_gaps_of_narrower_types_start_from_previous_models(least) -> None:
    received, _ = federation()
    _, z = federation()
    mask = gaps(received)
    noise = torch.where(mask, received, math.nan).bfloat16()
    signals = Models(posed(noise, z, mask, Problem(alpha=0.0)), least=least, previous=(received + 1).bfloat16())
    PDCA(max_iter=1).solve(signals)
    expected = torch.where(mask, received, received + 1)
    torch.testing.assert_close(signals.result().double(), expected, rtol=1e-2, atol=1e-2)


def test_gaps_are_not_looked_at_where_there_is_a_start() -> None:
    received, _ = federation()
    previous = torch.full_like(received, math.nan)
    for least in (1, 8, NONE):
        signals, *_, _z = held(least, previous=previous, start=received)
        assert PDCA(max_iter=50).solve(signals)[0].reason in ("converged", "max_iter")
        assert bool(torch.isfinite(signals.result()).all())


@pytest.mark.parametrize("scale", [1e19, 1e21])
def test_squares_beyond_single_precision(scale) -> None:
    received, z = federation()
    mask = gaps(received)
    for least in (1, 8, NONE):
        signals = Models(posed((received * scale).float(), z, mask), least=least)
        assert PDCA(max_iter=3, eps=0.0).solve(signals)[0].iterations == 3


@pytest.mark.parametrize("momentum", [None, np.full((1, 1, 1, 1), 0.5)])
@pytest.mark.parametrize("scale", [1.0, 1e-21, 1e19])
def test_a_step_in_many_parts_and_single_precision_is_that_of_one_in_double(scale, momentum, monkeypatch) -> None:
    received, z = federation()
    mask, S, one = (
        gaps(received),
        0.01 * laplacian(torch.ones(1, 1, len(z), len(z), dtype=torch.float64)).numpy(),
        np.ones((1, 1, 1, 1)),
    )
    single = posed((received * scale).float(), z, mask)
    whole = Models(posed(single.pulls[0].target.double(), z, mask), least=NONE)
    pieces = [(0, slice(start, min(start + 32, 300))) for start in range(0, 300, 32)]
    monkeypatch.setattr(models, "chunks", lambda *_: iter(pieces))
    many = Models(single, least=NONE)
    for each in (whole, many):
        each.start()
        each.propose(S, one)
        each.accept()
    expected, sums = (each.propose(S, one, momentum, momentum is not None) for each in (whole, many))
    for ours, right in zip(
        (*sums.squares, sums.step, sums.gram), (*expected.squares, expected.step, expected.gram), strict=True
    ):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("least", [1, 8])
@pytest.mark.parametrize("layers", [(300,), LAYERS])
def test_alternating_minimisation_filters_the_same(least, layers) -> None:
    def alternate(least: int) -> tuple[torch.Tensor, Solution]:
        signals, _, _, _z = held(least, layers)
        (solution,) = Alternating(eps=0.0, max_iter=4).solve(signals)
        return signals.result(), solution

    (together, first), (apart, second) = alternate(least), alternate(NONE)
    torch.testing.assert_close(together, apart, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(first.graphs, second.graphs, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(first.objective, second.objective, rtol=1e-9)


def test_what_arrived_and_is_not_finite_is_an_error() -> None:
    received, z = federation()
    mask = gaps(received)
    row, column = mask.nonzero()[0].tolist()
    received[row, column] = torch.inf
    for least in (1, NONE):
        with pytest.raises(ValueError, match="not finite"):
            PDCA().solve(Models(posed(received, z, mask), least=least))


def test_many_columns_of_few_patterns_are_held_by_pattern_unasked() -> None:
    received, z = federation(size=4000)
    for rate, kinds in ((0.02, [Coefficients, Columns]), (0.5, [Columns])):
        mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > rate
        assert parts(Models(posed(received, z, mask))) == kinds


@given(st.data())
def test_common_patterns_are_those_of_a_loop_over_columns(data) -> None:
    clients = data.draw(st.sampled_from([1, 2, 5, 32, 33, 70]))
    layers = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    size, least = sum(layers), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    few = torch.rand(clients, 3, generator=generator) > 0.4  # few different columns, some of them twice
    mask = few[:, torch.randint(3, (size,), generator=generator)]
    layer_of = [layer for layer, width in enumerate(layers) for _ in range(width)]
    found: dict[tuple[int, ...], list[int]] = {}
    for column in range(size):
        found.setdefault((layer_of[column], *mask[:, column].int().tolist()), []).append(column)
    common = [found[key] for key in sorted(found) if len(found[key]) >= least]
    rest = sorted(column for columns in found.values() if len(columns) < least for column in columns)

    groups = common_patterns(mask, layers, least)
    assert groups.order.tolist() == [column for columns in common for column in columns]
    assert groups.sizes == [len(columns) for columns in common]
    assert groups.layers == [layer_of[columns[0]] for columns in common]
    assert groups.rest.tolist() == rest
    assert groups.rest_layers == [sum(layer_of[column] == layer for column in rest) for layer in range(len(layers))]


def test_pulls_with_gaps_of_their_own_leave_what_they_pull_to_as_it_is() -> None:
    received, z = federation()
    mask, other = gaps(received), torch.rand(received.shape, generator=torch.Generator().manual_seed(2)) > 0.5
    problem, former = posed(received, z, mask), received.flip(0).contiguous()
    pull = Pull(former, torch.full((len(z),), 0.3, dtype=torch.float64), other)
    copies, found = (received.clone(), former.clone()), []
    for least in (1, NONE):
        models = Models(problem.but(pulls=(*problem.pulls, pull)), least=least)
        (solution,) = PDCA(max_iter=40, backtracking=True, accelerated=True).solve(models)
        found.append((models.result(), solution.objective))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-9)
    assert torch.equal(received, copies[0])
    assert torch.equal(former, copies[1])
