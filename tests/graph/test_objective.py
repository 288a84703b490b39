"""The objective against sums over edges in plain Python, its gradients against autograd and finite differences."""

import math

import numpy as np
import pytest
import torch

from jgesr_lightning.graph import (
    filter_signals,
    gradient_graph,
    gradient_signals,
    learn_graph,
    objective,
    pairwise_sq_distances,
    prox_log_degree,
)
from jgesr_lightning.graph.problem import Problem
from tests.graph.algebra import from_upper_triangle, upper_triangle
from tests.graph.split import difference_of_convex, smoothness

CONSTANTS = {"alpha": 0.3, "beta": 0.7, "gamma": 1.3, "mu": 0.9}


def instance(masked: bool, nodes: int = 5, size: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    psi = torch.randn(nodes, size, dtype=torch.float64, generator=generator)
    w = torch.rand(nodes * (nodes - 1) // 2, dtype=torch.float64, generator=generator) + 0.1
    mask = torch.rand(nodes, size, generator=generator) > 0.3 if masked else None
    received = torch.randn(nodes, size, dtype=torch.float64, generator=generator)
    z = torch.rand(nodes, dtype=torch.float64, generator=generator) + 0.1
    return psi, w, received, z, mask


@pytest.mark.parametrize("masked", [False, True])
def test_objective_is_the_sum_written_out(masked: bool) -> None:
    psi, w, received, z, mask = instance(masked)
    W = from_upper_triangle(w, 5)
    a, b, g, m = CONSTANTS.values()
    total = 0.0
    for k in range(5):
        estimate = psi[k] if mask is None else psi[k] * mask[k]
        total += m / 2 * float(z[k]) * float((estimate - received[k]).square().sum())
        total -= b * math.log(float(W[k].sum()))
        for n in range(k):
            total += float(W[k, n]) * (a * float((psi[k] - psi[n]).square().sum()) + g)
    assert float(objective(psi, W, received, z, mask, **CONSTANTS)) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_by_autograd(masked: bool) -> None:
    psi, w, received, z, mask = instance(masked)
    psi.requires_grad_()
    w.requires_grad_()
    objective(psi, from_upper_triangle(w, 5), received, z, mask, **CONSTANTS).backward()
    with torch.no_grad():
        W = from_upper_triangle(w, 5)
        by_hand = gradient_signals(psi, W, received, z, mask, CONSTANTS["alpha"], CONSTANTS["mu"])
        edges = gradient_graph(psi, W, CONSTANTS["alpha"], CONSTANTS["beta"], CONSTANTS["gamma"])
    torch.testing.assert_close(psi.grad, by_hand, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(w.grad, upper_triangle(edges), rtol=1e-10, atol=1e-12)


def test_gradients_by_finite_differences() -> None:
    psi, w, received, z, mask = instance(True)
    step = 1e-6
    by_hand = gradient_signals(psi, from_upper_triangle(w, 5), received, z, mask, CONSTANTS["alpha"], CONSTANTS["mu"])
    for index in [(0, 0), (2, 3), (4, 6)]:
        shift = torch.zeros_like(psi)
        shift[index] = step
        up, down = (
            objective(psi + sign * shift, from_upper_triangle(w, 5), received, z, mask, **CONSTANTS) for sign in (1, -1)
        )
        assert float((up - down) / (2 * step)) == pytest.approx(float(by_hand[index]), rel=1e-6)
    edges = gradient_graph(psi, from_upper_triangle(w, 5), 0.3, 0.7, 1.3)
    shift = torch.zeros_like(w)
    shift[4] = step
    up, down = (
        objective(psi, from_upper_triangle(w + sign * shift, 5), received, z, mask, **CONSTANTS) for sign in (1, -1)
    )
    assert float((up - down) / (2 * step)) == pytest.approx(float(upper_triangle(edges)[4]), rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_objective_is_the_difference_of_its_convex_parts(masked: bool) -> None:
    psi, w, received, z, mask = instance(masked)
    W = from_upper_triangle(w, 5)
    split = difference_of_convex(psi, W, received, z, mask, **CONSTANTS)
    torch.testing.assert_close(
        split.smooth + split.nonsmooth - split.concave, objective(psi, W, received, z, mask, **CONSTANTS)
    )
    d = upper_triangle(pairwise_sq_distances(psi))
    away = (psi if mask is None else psi * mask) - received
    torch.testing.assert_close(split.smooth, 0.45 * z @ away.square().sum(1) + 0.15 * (w + d).square().sum())
    torch.testing.assert_close(split.nonsmooth, -0.7 * W.sum(1).log().sum() + 1.3 * w.sum())
    torch.testing.assert_close(split.concave, 0.15 * (w.square().sum() + d.square().sum()))


def test_convex_parts_are_convex_along_lines() -> None:
    psi, w, received, z, mask = instance(True)
    other, v = psi.flip(0) * 2, w.flip(0)
    ends = [difference_of_convex(p, from_upper_triangle(e, 5), received, z, mask, **CONSTANTS) for p, e in
            ((psi, w), (other, v))]  # fmt: skip
    middle = difference_of_convex(
        (psi + other) / 2, from_upper_triangle((w + v) / 2, 5), received, z, mask, **CONSTANTS
    )
    for part in range(3):
        assert float(middle[part]) <= float(ends[0][part] + ends[1][part]) / 2 + 1e-12


def test_smoothness_three_ways() -> None:
    psi, w, *_ = instance(False)
    W = from_upper_triangle(w, 5)
    D = pairwise_sq_distances(psi)
    torch.testing.assert_close(smoothness(psi, W), (W * D).sum() / 2)
    torch.testing.assert_close(smoothness(psi, W), (w * upper_triangle(D)).sum())


def test_objective_is_infinite_where_a_client_has_no_edge() -> None:
    psi, _, received, z, _ = instance(False)
    W = torch.zeros(5, 5, dtype=torch.float64)
    assert float(objective(psi, W, received, z, None, **CONSTANTS)) == math.inf


def test_batch_equals_loop() -> None:
    items = [torch.randn(3, 4, 6, dtype=torch.float64) for _ in range(2)]
    W = from_upper_triangle(torch.rand(3, 6, dtype=torch.float64) + 0.1, 4)
    z = torch.rand(4, dtype=torch.float64)
    together = objective(items[0], W, items[1], z, None, **CONSTANTS)
    apart = [objective(items[0][i], W[i], items[1][i], z, None, **CONSTANTS) for i in range(3)]
    torch.testing.assert_close(together, torch.stack(apart))


def test_the_closed_form_and_the_prox_are_stationary_points_of_the_objective() -> None:
    psi, w, received, z, _ = instance(False)
    W = from_upper_triangle(w, 5)
    best = filter_signals(received, W, z, CONSTANTS["alpha"], CONSTANTS["mu"])
    gradient = gradient_signals(best, W, received, z, None, CONSTANTS["alpha"], CONSTANTS["mu"])
    assert float(gradient.abs().max()) < 1e-12
    rho = 0.4
    theta = W - CONSTANTS["alpha"] / rho * pairwise_sq_distances(psi)
    new = prox_log_degree(theta, CONSTANTS["beta"], CONSTANTS["gamma"], rho)
    edges = gradient_graph(psi, new, 0.0, CONSTANTS["beta"], CONSTANTS["gamma"]) + rho * (new - theta)
    edges = edges.masked_fill(torch.eye(5, dtype=torch.bool), 0)
    assert float(torch.where(new > 0, edges.abs(), -edges).max()) < 1e-10


def test_what_psi_holds_behind_the_mask_counts_only_in_the_smoothness() -> None:
    """And wrong arguments are named."""
    mask = torch.tensor([[True, False], [True, True]])
    Psi = torch.tensor([[1.0, 1e3], [2.0, 3.0]])
    W = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    fidelity = objective(Psi, W, torch.zeros(2, 2), torch.ones(2), mask, 0.0, 1.0, 0.0, 1.0)
    assert float(fidelity) == 0.5 * (1 + 4 + 9)
    with pytest.raises(ValueError, match=r"Psi must be a torch\.Tensor; got ndarray"):
        objective(Psi.numpy(), W, Psi, torch.ones(2), mask, 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="weights must have shape"):
        objective(Psi, W, Psi, torch.ones(3), mask, 1.0, 1.0, 1.0, 1.0)


def surcharged() -> tuple[torch.Tensor, Problem]:
    """Distances, and a problem in which some edges cost more."""
    psi, w, *_ = instance(False)
    extra = from_upper_triangle(torch.where(torch.arange(len(w)) % 3 == 0, 7 * w, 0), 5)
    noise = from_upper_triangle(w.flip(0), 5)
    problem = Problem(0.3, 0.7, 1.3, noise=noise[None].numpy(), surcharge=extra[None].numpy(), unit=2.0)
    return pairwise_sq_distances(psi)[None], problem


def test_a_surcharge_is_on_top_of_what_an_edge_costs() -> None:
    D, problem = surcharged()
    costs = problem.costs(D.numpy())
    for m in range(5):
        for n in range(5):
            extra = float(problem.surcharge[0, m, n])
            distance = max(0.0, float(D[0, m, n] - problem.noise[0, m, n]))
            assert float(costs[0, m, n]) == pytest.approx(0.3 / 2.0 * distance + 1.3 + extra, rel=1e-12)


def test_the_printed_start_of_the_graph_is_what_cosines_exceed_zero_by() -> None:
    D, _ = surcharged()
    cosines = torch.cos(D)
    start = Problem().first_graph(cosines.numpy().copy(), D.numpy())
    for m in range(5):
        for n in range(5):
            assert float(start[0, m, n]) == (max(0.0, float(cosines[0, m, n])) if m != n else 0.0)


def test_a_surcharge_is_in_the_objective_and_in_its_derivatives() -> None:
    D, problem = surcharged()
    w = torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1

    def value(weights: torch.Tensor, one: Problem = problem) -> float:
        W = from_upper_triangle(weights, 5)[None, None].numpy()
        return float(one.value([np.zeros(1)], D[None].numpy(), W).item())

    extra = upper_triangle(torch.from_numpy(problem.surcharge))[0]
    assert value(w) - value(w, problem.but(surcharge=0.0)) == pytest.approx(2.0 * float(w @ extra), rel=1e-12)
    gain, cost = problem.balance(D.numpy(), from_upper_triangle(w, 5)[None].numpy())
    edges = upper_triangle(torch.from_numpy(cost - gain))[0]
    for index in (0, 1, 4):
        shift = 1e-6 * torch.eye(10, dtype=torch.float64)[index]
        slope = (value(w + shift) - value(w - shift)) / 2e-6
        assert slope == pytest.approx(2.0 * float(edges[index]), rel=1e-6)


def test_pairs_that_belong_together_count_at_the_mean_of_their_distances() -> None:
    D, problem = surcharged()
    groups = [0, 1, 0, 1, 0]
    alike = [(m, n) for m in range(5) for n in range(5) if m != n and groups[m] == groups[n]]
    together = np.zeros((5, 5))
    for pair in alike:
        together[pair] = 1
    problem = problem.but(together=together, surcharge=0.0, unit=1.0)
    counted = problem.counted(D.numpy())
    freed = sum(float(D[0][pair]) - float(problem.noise[0][pair]) for pair in alike) / len(alike)
    for m in range(5):
        for n in range(m):
            apart = max(0.0, float(D[0, m, n] - problem.noise[0, m, n]))
            assert float(counted[0, m, n]) == pytest.approx(max(0.0, freed) if (m, n) in alike else apart, rel=1e-12)
    start = problem.first_graph(np.ones((1, 1, 5, 5)), D.numpy()[None])  # the learnt one: cosines have no part in it
    expected = learn_graph(torch.from_numpy(counted), 0.3, 0.7, 1.3)
    torch.testing.assert_close(torch.from_numpy(start[0]), expected, rtol=1e-8, atol=1e-10)
    free = problem.but(noise=0.0, together=np.zeros((5, 5)))
    np.testing.assert_array_equal(free.counted(D.numpy()), D.numpy())


def test_the_learnt_graph_and_the_prox_pay_the_surcharge() -> None:
    D, problem = surcharged()
    D, problem = D.numpy()[None], problem.but(unit=1.0)
    W = problem.learnt_graph(D, careful=True).W
    left, free = (
        each.stationarity(np.zeros(1), np.zeros(1), D, W).graph for each in (problem, problem.but(surcharge=0.0))
    )
    assert float(left.item()) < 1e-9 and float(free.item()) > 1e-3
    moved = problem.prox_graph(W, D, 0.4, None).W
    expected = prox_log_degree(torch.from_numpy(W - problem.costs(D) / 0.4), 0.7, 0.0, 0.4)
    torch.testing.assert_close(torch.from_numpy(moved), expected)
    np.testing.assert_allclose(moved, W, rtol=1e-6, atol=1e-8)  # where nothing is left to gain
