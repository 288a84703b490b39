"""Alternating minimisation: each half is the minimiser it claims to be, and J only falls."""

import itertools

import numpy as np
import pytest
import torch

from jgesr_lightning.graph import filter_signals, learn_graph, objective, pairwise_sq_distances
from jgesr_lightning.solvers import Alternating, Models
from tests.solvers.test_pdca import federation, in_coefficients, posed


def by_hand(received: torch.Tensor, z: np.ndarray, mask: torch.Tensor | None, start: torch.Tensor, rounds: int):
    psi, trace = start, []
    known = received if mask is None else torch.where(mask, received, 0)
    weights = torch.from_numpy(z)
    for _ in range(rounds):
        W = learn_graph(pairwise_sq_distances(psi), 0.05, 1.0, 1.0)
        if not trace:
            trace.append(float(objective(psi, W, known, weights, mask, 0.05, 1.0, 1.0, 1.0)))
        psi = filter_signals(received, W, weights, 0.05, 1.0, mask=mask, start=psi)
        trace.append(float(objective(psi, W, known, weights, mask, 0.05, 1.0, 1.0, 1.0)))
    return psi, W, trace


@pytest.mark.parametrize("missing", [None, 0.0, 0.3])
def test_is_learning_and_filtering_in_turn(missing) -> None:
    received, z = federation()
    mask = None
    if missing is None:
        signals = in_coefficients(received, z)
    else:
        mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) >= missing
        signals = Models(posed(received, z, mask), previous=received + 0.1)
    (solution,) = Alternating(eps=0.0, max_iter=3).solve(signals)
    start = received if mask is None else torch.where(mask, received, received + 0.1)
    psi, W, trace = by_hand(received, z, mask, start, 3)
    torch.testing.assert_close(signals.result(), psi, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(solution.graphs[0], W.numpy(), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(solution.objective, trace, rtol=1e-9)
    assert solution.reason == "max_iter"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_objective_never_rises_and_it_stops(scale) -> None:
    received, z = federation()
    (solution,) = Alternating(eps=1e-6, max_iter=200).solve(in_coefficients(received * scale, z))
    assert all(b <= a + 1e-10 * max(1, abs(a)) for a, b in itertools.pairwise(solution.objective))
    assert solution.converged
    assert solution.step_norm < 1e-6
    assert not solution.rose


def test_values_that_are_not_finite_are_an_error() -> None:
    received, z = federation()
    received[0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        Alternating().solve(in_coefficients(received, z))
