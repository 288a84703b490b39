"""Both fast forms of the solver against the algorithm as printed, and what it promises about J."""

import itertools
import math

import numpy as np
import pytest
import torch

from jgesr_lightning.graph import gradient_signals, objective
from jgesr_lightning.graph.problem import Problem, Pull
from jgesr_lightning.solvers import PDCA, Alternating, Models, Solution
from tests.solvers.reference import pdca_as_printed

CLIENTS, SIZE = 8, 300
PROBLEM = Problem()


def federation(clients: int = CLIENTS, size: int = SIZE, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(3, size, dtype=torch.float64, generator=generator)[torch.arange(clients) % 3]
    received = 0.3 * groups + 0.1 * torch.randn(clients, size, dtype=torch.float64, generator=generator)
    weights = torch.rand(clients, dtype=torch.float64, generator=generator) + 0.01
    return received + 0.5, (weights / weights.sum()).numpy()


def posed(
    received: torch.Tensor, z: np.ndarray, mask: torch.Tensor | None = None, problem: Problem = PROBLEM
) -> Problem:
    return problem.pulled(received, torch.from_numpy(z), mask)


def in_coefficients(
    received: torch.Tensor, z: np.ndarray, start: torch.Tensor | None = None, problem=PROBLEM
) -> Models:
    return Models(posed(received, z, problem=problem), start=start)


def in_columns(
    received: torch.Tensor, z: np.ndarray, mask: torch.Tensor | None = None, problem=PROBLEM, **extra
) -> Models:
    mask = torch.ones_like(received, dtype=torch.bool) if mask is None else mask
    return Models(posed(received, z, mask, problem), least=10**9, **extra)


def run(models: Models, **settings: object) -> tuple[torch.Tensor, Solution]:
    (solution,) = PDCA(**settings).solve(models)  # type: ignore[arg-type]
    return models.result(), solution


@pytest.mark.parametrize("form", [in_coefficients, in_columns])
@pytest.mark.parametrize("constants", [(0.05, 1.0, 1.0, 1.0, 1.0), (0.02, 0.5, 2.0, 1.5, 2.0)])
def test_agrees_with_the_algorithm_as_printed(form, constants) -> None:
    received, z = federation()
    problem, rho = Problem(*constants[:4]), constants[4]
    expected, W, trace = pdca_as_printed(received, torch.from_numpy(z), problem=problem, rho=rho, max_iter=400)
    models, solution = run(form(received, z, problem=problem), rho=rho, max_iter=400)
    assert solution.iterations == len(trace) - 1 > 10
    assert float((models - expected).norm() / expected.norm()) < 1e-8
    assert float((torch.from_numpy(solution.graphs[0]) - W).abs().max() / W.max()) < 1e-8
    np.testing.assert_allclose(solution.objective, trace, rtol=1e-9)


@pytest.mark.parametrize("form", [in_coefficients, in_columns])
@pytest.mark.parametrize("clients", [3, 7, 20])
def test_all_is_double_precision_for_any_number_of_clients(form, clients) -> None:
    """One part in 20, say, is no number of single precision; one in 8 is."""
    received, z = federation(clients)
    expected, W, trace = pdca_as_printed(received, torch.from_numpy(z), problem=PROBLEM, eps=0, max_iter=5)
    models, solution = run(form(received, z), eps=0, max_iter=5)
    np.testing.assert_allclose(solution.objective, trace, rtol=1e-12)
    torch.testing.assert_close(models, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(solution.graphs[0], W.numpy(), rtol=1e-11, atol=1e-13)


def test_masked_form_agrees_with_the_algorithm_as_printed() -> None:
    received, z = federation()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.2
    previous = received + 0.05
    noise = torch.where(mask, received, torch.full_like(received, 1e3))
    models, solution = run(in_columns(noise, z, mask, previous=previous), max_iter=400)
    start = torch.where(mask, received, previous)
    expected, W, trace = pdca_as_printed(
        torch.where(mask, received, 0), torch.from_numpy(z), mask, problem=PROBLEM, max_iter=400, start=start
    )
    assert solution.iterations == len(trace) - 1
    assert float((models - expected).norm() / expected.norm()) < 1e-8
    assert float((torch.from_numpy(solution.graphs[0]) - W).abs().max()) < 1e-8
    np.testing.assert_allclose(solution.objective, trace, rtol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"backtracking": True}, {"accelerated": True},
                                      {"backtracking": True, "accelerated": True}])  # fmt: skip
def test_an_all_true_mask_changes_nothing(settings) -> None:
    received, z = federation()
    plain, first = run(in_coefficients(received, z), **settings)
    masked, second = run(in_columns(received, z, torch.ones_like(received, dtype=torch.bool)), **settings)
    assert first.iterations == second.iterations
    torch.testing.assert_close(masked, plain, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(second.graphs, first.graphs, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(second.objective, first.objective, rtol=1e-9)


def test_start_from_other_models() -> None:
    received, z = federation()
    start = received.flip(1)
    expected, W, trace = pdca_as_printed(received, torch.from_numpy(z), problem=PROBLEM, start=start)
    for signals in (in_coefficients(received, z, start), in_columns(received, z, start=start)):
        models, solution = run(signals)
        assert solution.iterations == len(trace) - 1
        torch.testing.assert_close(models, expected, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(solution.graphs[0], W.numpy(), rtol=1e-8, atol=1e-9)


def test_single_precision_rows_that_share_a_large_part() -> None:
    clients, size = 20, 600_000
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(size, dtype=torch.float64, generator=generator)
    apart = torch.randn(clients, size, dtype=torch.float64, generator=generator)
    exact = shared * (1e3 / shared.norm()) + apart * (1e-1 / apart.norm(dim=1, keepdim=True))
    received = exact.float()
    z = np.linspace(1, 2, clients)
    z /= z.sum()
    settings = {"eps": 0.0, "max_iter": 3}
    expected, W, _ = pdca_as_printed(received, torch.from_numpy(z), problem=PROBLEM, **settings)
    mask = torch.ones_like(received, dtype=torch.bool)
    for signals in (in_coefficients(received, z), in_columns(received, z, mask)):
        models, solution = run(signals, **settings)
        assert float((models - expected).norm() / expected.norm()) < 1e-6
        assert float((models - expected).norm()) < 1.5 * float((expected.float() - expected).norm())  # rounded once
        assert float((torch.from_numpy(solution.graphs[0]) - W).abs().max() / W.max()) < 1e-4


@pytest.mark.parametrize(("scale", "alpha", "there"), [(1.0, 0.05, True), (1e2, 10.0, False), (1e4, 0.05, False)])
def test_a_step_that_backtracking_has_made_short_is_not_taken_for_the_end(scale, alpha, there) -> None:
    received, z = federation()
    _, solution = run(in_coefficients(received * scale, z, problem=Problem(alpha)), backtracking=True)
    assert solution.step_norm < 1e-3  # as `step: fixed` would stop at
    assert solution.converged == there == (solution.step_norm * solution.rho < 1e-3)
    assert (solution.stationarity[0] < 0.01) == there


@pytest.mark.parametrize("scale", [1e-3, 1e-1, 1.0, 10.0, 1e2, 1e3])
@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_backtracking_never_lets_the_objective_rise(scale, accelerated, masked) -> None:
    received, z = federation()
    received = received * scale
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.1
    signals = in_columns(received, z, mask) if masked else in_coefficients(received, z)
    models, solution = run(signals, backtracking=True, accelerated=accelerated, max_iter=60)
    trace = solution.objective
    assert len(trace) == solution.iterations + 1
    assert all(b <= a + 1e-10 * max(1, abs(a)) for a, b in itertools.pairwise(trace))
    assert not solution.rose
    assert bool(torch.isfinite(models).all())
    known = torch.where(mask, received, 0) if masked else received
    value = objective(
        models,
        torch.from_numpy(solution.graphs[0]),
        known,
        torch.from_numpy(z),
        mask if masked else None,
        0.05,
        1,
        1,
        1,
    )
    assert float(value) == pytest.approx(trace[-1], rel=1e-9)


@pytest.mark.parametrize("form", [in_coefficients, in_columns])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_fixed_step_that_is_too_long_says_so_and_stays_finite(form, dtype) -> None:
    received, z = federation()
    models, solution = run(form(received.to(dtype), z), rho=1e-3, max_iter=300)
    assert solution.reason == "diverged"
    assert not solution.converged
    assert bool(torch.isfinite(models).all())
    assert bool(np.isfinite(solution.graphs).all())
    assert len(solution.objective) == solution.iterations + 1
    assert all(math.isfinite(value) for value in solution.objective)


def test_a_fixed_step_that_only_goes_round_in_the_distance_says_so() -> None:
    """Smoothing of weight one over twelve clients alike: 2 alpha lambda_max(L) is far above 2 rho at the start."""
    generator = torch.Generator().manual_seed(0)
    groups = 0.02 * torch.randn(3, 2000, dtype=torch.float64, generator=generator)[torch.arange(12) % 3]
    received = groups + 0.03 * torch.randn(12, 2000, dtype=torch.float64, generator=generator)
    problem, z = Problem(alpha=1.0), np.full(12, 1 / 12)
    away, solution = run(in_coefficients(received, z, problem=problem))
    assert solution.iterations == 500
    assert solution.reason == "diverged"
    assert solution.objective[-1] > solution.objective[0]
    assert away.norm() > 2 * received.norm()
    there, solution = run(in_coefficients(received, z, problem=problem), backtracking=True)
    assert solution.reason == "converged"
    assert there.norm() < received.norm()


def test_a_last_step_that_meets_the_criterion_has_converged() -> None:
    received, z = federation()
    (long,) = PDCA(eps=1e-4, max_iter=3000, stop="stationarity").solve(in_coefficients(received, z))
    assert long.converged
    (short,) = PDCA(eps=1e-4, max_iter=long.iterations - 1, stop="stationarity").solve(in_coefficients(received, z))
    (last,) = PDCA(eps=1e-4, max_iter=long.iterations, stop="stationarity").solve(in_coefficients(received, z))
    assert last.converged
    assert last.objective == long.objective
    # one step earlier is between two looks: what counts is where it ended
    assert short.converged == (max(short.stationarity) < 1e-4)


def test_a_squared_gradient_that_rounds_to_less_than_nothing_is_none() -> None:
    """It is a sum whose terms cancel, where one client is in another world."""
    W = 1.0 - np.eye(3)[None, None]
    found = PROBLEM.stationarity(np.array([-1e-9]), np.array([1.0]), W, W)
    assert found.models.tolist() == [0.0]


def test_reports_that_the_objective_rose() -> None:
    received, z = federation()
    _, solution = run(in_coefficients(received * 3, z), rho=0.2, max_iter=6)
    rose = any(b > a + 1e-9 * max(1, abs(a)) for a, b in itertools.pairwise(solution.objective))
    assert rose
    assert solution.rose


def test_acceleration_needs_fewer_steps_for_the_same_objective() -> None:
    received, z = federation()
    _, plain = run(in_coefficients(received, z), eps=1e-6, max_iter=3000)
    _, fast = run(in_coefficients(received, z), eps=1e-6, max_iter=3000, accelerated=True)
    assert plain.converged
    assert fast.converged
    assert fast.iterations < plain.iterations / 2
    assert fast.objective[-1] <= plain.objective[-1] + 1e-6


def test_init_step_result_are_solve() -> None:
    received, z = federation()
    solver = PDCA(max_iter=30)
    _, whole = run(in_coefficients(received, z), max_iter=30)
    signals = in_coefficients(received, z)
    state = solver.init(signals)
    values = [float(state.value[0])]
    for _ in range(whole.iterations):
        assert state.reason == 0
        state = solver.step(signals, state)
        values.append(float(state.value[0]))
    assert state.reason != 0
    assert values == whole.objective
    np.testing.assert_array_equal(state.W[0], whole.graphs)


def test_values_that_are_not_finite_are_an_error() -> None:
    received, z = federation()
    received[2, 3] = math.nan
    for signals in (in_coefficients(received, z), in_columns(received, z)):
        with pytest.raises(ValueError, match="not finite"):
            PDCA().solve(signals)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("solver", [PDCA(eps=1e-9, max_iter=20_000), Alternating(eps=1e-10)])
def test_a_further_quadratic_in_the_models_is_one_more_pull(missing, solver) -> None:
    """A ridge towards the former models: the solvers, in either form, end where its gradient vanishes."""
    received, z = federation()
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.2 if missing else None
    former, ridge = received.flip(0), 0.3
    problem = posed(received, z, mask)
    problem = problem.but(pulls=(*problem.pulls, Pull(former, torch.full((CLIENTS,), ridge, dtype=torch.float64))))
    found = []
    for least in (1, 10**9) if missing else (None,):
        models = Models(problem, least=least)
        (solution,) = solver.solve(models)
        psi, W = models.result(), torch.from_numpy(solution.graphs[0])
        known = torch.where(mask, received, 0) if missing else received
        gradient = gradient_signals(psi, W, known, torch.from_numpy(z), mask, 0.05, 1.0) + ridge * (psi - former)
        assert float(gradient.abs().max()) < 1e-7
        found.append(psi)
    torch.testing.assert_close(found[0], found[-1], rtol=1e-7, atol=1e-8)
