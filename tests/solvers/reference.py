"""The algorithm as the paper prints it, in d-space and float64 throughout: what the solver must agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.graph import (
    cosine_from_gram,
    gradient_signals,
    gram,
    objective,
    pairwise_sq_distances,
    prox_log_degree,
)
from jgesr_lightning.graph.problem import Problem


def pdca_as_printed(
    received: Tensor,
    weights: Tensor,
    mask: Tensor | None = None,
    *,
    problem: Problem,
    rho: float = 1.0,
    eps: float = 1e-3,
    max_iter: int = 500,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[float]]:
    """Return (Psi, W, trace of J) of Algorithm 1 with a fixed step; one full pass in d-space an operation.

    Args:
        received: X_r, (..., K, d), zero where nothing arrived.
        weights: diagonal of Z, (K,).
        mask: M, (..., K, d) bool, or None.
        problem: alpha, beta, gamma, mu.
        rho: inverse step.
        eps: stop when ||Psi+ - Psi||_F < eps.
        max_iter: stop after that many steps.
        start: Psi_0; None: `received`.
    """
    alpha, beta, gamma, mu = problem.alpha, problem.beta, problem.gamma, problem.mu
    received = received.to(torch.float64)
    psi = (received if start is None else start.to(torch.float64)).clone()
    W = cosine_from_gram(gram(psi)).clamp_min(0)
    W = W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))
    trace = [float(objective(psi, W, received, weights, mask, alpha, beta, gamma, mu).sum())]
    for _ in range(max_iter):
        step = -gradient_signals(psi, W, received, weights, mask, alpha, mu) / rho
        W = prox_log_degree(W - alpha / rho * pairwise_sq_distances(psi), beta, gamma, rho)
        psi = psi + step
        trace.append(float(objective(psi, W, received, weights, mask, alpha, beta, gamma, mu).sum()))
        if float(step.norm()) < eps:
            break
    return psi, W, trace
