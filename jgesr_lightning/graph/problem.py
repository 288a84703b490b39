r"""The joint problem: one object that says what is minimised, and that everything asks which needs to know.

.. math:: J(\Psi, w) = \underbrace{\tfrac\mu2 \|M * \Psi - X_r\|_Z^2}_{\text{fidelity}}
          + \underbrace{\alpha \textstyle\sum_e w_e d_e(\Psi)}_{\text{smoothness}}
          \underbrace{- \beta \textstyle\sum_k \log \deg_k(w)}_{\text{barrier}}
          + \underbrace{\gamma \textstyle\sum_e w_e}_{\text{sparsity}}, \qquad w \ge 0

Sums over e run over edges, each pair of clients once; W is symmetric with zero diagonal and holds every edge twice.

Under `neighbours` the graph's own terms are those of Kalofolias and Perraudin (ICLR 2019), :math:`u\,(-\beta \sum \log
\deg + \frac12 \|w\|^2)`: a quadratic in place of the sum, without which a minimiser has hardly more edges than nodes,
and a unit u (one for each graph) that follows the size of the distances, so that J does not depend on the data's scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, add_product, of, per_problem, positive_part, set_diagonal
from jgesr_lightning.graph.laplacian import laplacian
from jgesr_lightning.graph.learning import learn, neighbour_scale
from jgesr_lightning.graph.prox import Prox, prox

SMOOTHINGS = ("full", "printed")


@dataclass(frozen=True)
class Pull:
    r"""One quadratic in the models, :math:`\frac12 \|M * (\Psi - T)\|_Z^2`, such as the fidelity to what arrived.

    Attributes:
        target: T, (..., K, d); not read where the mask is False.
        weights: diagonal of Z, (K,) float64, its constant included.
        mask: M, (..., K, d) bool, or None where it is one everywhere.
    """

    target: Tensor
    weights: Tensor
    mask: Tensor | None = None


class Terms(NamedTuple):
    """The terms of J, each (...,) float64."""

    fidelity: Array
    smoothness: Array
    barrier: Array
    sparsity: Array

    @property
    def total(self) -> Array:
        """J, their sum."""
        return self.fidelity + self.smoothness + self.barrier + self.sparsity


class Stationarity(NamedTuple):
    """How far the optimality conditions of J fail, relative to their terms: 0 where they hold, at most 1. (B,) each.

    Attributes:
        models: norm of the gradient by Psi over the sum of the norms of its parts.
        graph: the larger of two: what is gained by the edges' weights, over their cost; and the worst edge outside.
    """

    models: Array
    graph: Array


@dataclass(frozen=True)
class Problem:
    """The constants and terms of J. K x K numbers are (N, K, K) arrays, N = B G: B problems with G graphs each.

    Attributes:
        alpha: weight of the smoothness.
        beta: weight of the log barrier.
        gamma: weight of the sum of the edges.
        mu: weight of the fidelity.
        smoothing: "full": models descend along the gradient of J, 2 alpha L Psi. "printed": along alpha L Psi, the
            operator that the paper prints for them, half of what its closed form and its graph step imply.
        ridge: weight of half the squared weights of the edges; see the module.
        unit: of the graph's own terms, a number or (N, 1, 1).
        noise: what is taken from the distances before the graph is learnt, a number or (N, K, K); never below zero.
            None: the least distance at the start, the closest pair being taken to differ by noise alone.
        neighbours: about how many edges a node is to have at the start: sets ridge, gamma and unit; see the module.
        pulls: the quadratics in the models.
    """

    alpha: float = 0.05
    beta: float = 1.0
    gamma: float = 1.0
    mu: float = 1.0
    smoothing: str = "full"
    ridge: float = 0.0
    unit: float | Array = 1.0
    noise: float | Array | None = 0.0
    neighbours: int | None = None
    pulls: tuple[Pull, ...] = ()

    def pulled(self, received: Tensor, weights: Tensor, mask: Tensor | None = None) -> Problem:
        """Return this problem for what arrived, Z = diag(weights). A further quadratic in Psi is one more `Pull`."""
        fidelity = Pull(received, self.mu * weights.to(received.device, torch.float64), mask)
        return self.but(pulls=(fidelity,))

    def but(self, **changes: object) -> Problem:
        """Return this problem with some of its parts replaced."""
        return type(self)(**{**self.__dict__, **changes})

    def scaled_to(self, D: Array) -> Problem:
        """Return this problem with what it takes from the distances at the start, (N, K, K)."""
        problem = self
        if self.noise is None:
            problem = self.but(noise=of(D).amin(set_diagonal(D * 1, math.inf), (-1, -2))[:, None, None] + 0 * D)
        if self.neighbours is None:
            return problem
        theta = neighbour_scale(problem.counted(D), self.neighbours)
        return problem.but(ridge=1.0, gamma=0.0, unit=self.alpha / (self.beta**0.5 * theta))

    # The models, for a given graph.

    def operator(self, W: Array) -> Array:
        """Return S of the gradient's smoothing part S Psi, (N, K, K): 2 alpha L."""
        return (2 if self.smoothing == "full" else 1) * self.alpha * laplacian(W)

    @staticmethod
    def gradient_models(psi: Array, S: Array, weights: Sequence[Array], away: Sequence[Array]) -> Array:
        """Return ``sum_i Z_i M_i * (Psi - T_i) + S Psi`` in whatever columns Psi is held.

        Args:
            psi: (..., K, n).
            S: (..., K, K), see `operator`.
            weights: of each pull, (..., K, 1), of its masked differences `away`, (..., K, n).
            away: ``M_i * (Psi - T_i)``.
        """
        gradient = S @ psi
        for weight, difference in zip(weights, away, strict=True):
            add_product(gradient, weight, difference)
        return gradient

    # The graph, for given models.

    def costs(self, D: Array) -> Array:
        """Return what an edge's weight costs, (N, K, K), without barrier and ridge, in the graph's unit."""
        return (self.alpha / self.unit) * self.counted(D) + self.gamma

    def counted(self, D: Array) -> Array:
        """Return the distances that the graph is learnt from."""
        return D if isinstance(self.noise, float) else set_diagonal(positive_part(D - self.noise), 0.0)

    def gradient_graph(self, D: Array, W: Array) -> Array:
        """Return the derivative of J by the weight of each edge, (N, K, K), zero diagonal; in the graph's unit."""
        inverse = self.beta / W.sum(-1)
        gradient = self.costs(D) + self.ridge * W - (inverse[..., :, None] + inverse[..., None, :])
        return set_diagonal(gradient, 0.0)

    def prox_graph(self, W: Array, D: Array, rho: float | Array, dual: Array | None, *, careful: bool = False) -> Prox:
        r"""Return :math:`\mathrm{prox}_{g/\rho}(w - \frac\alpha\rho d(\Psi))`, g and rho in their unit."""
        step = self.alpha / (self.unit * rho)
        theta = W - step * self.counted(D)
        if self.ridge:
            theta, rho = theta * (rho / (rho + self.ridge)), rho + self.ridge
        return prox(theta, self.beta, self.gamma, rho, dual, careful=careful)

    def learnt_graph(self, D: Array, start: Array | None, *, careful: bool = False) -> Prox:
        """Return the minimiser of J over the graph, for given models; from `start`, where there is one."""
        if self.ridge:
            return prox(self.costs(D) / -self.ridge, self.beta, 0.0, self.ridge, careful=careful)
        return learn(self.costs(D), self.beta, start, careful=careful)

    # Values.

    def terms(self, squares: Sequence[Array], D: Array, W: Array) -> Terms:
        """Return the terms of J for each graph, (N,); `squares` are ``||M_i * (Psi - T_i)||_{Z_i}^2``, (N,) each."""
        deg = W.sum(-1)
        unit = self.unit if isinstance(self.unit, float) else self.unit[..., 0, 0]
        edges = (self.gamma / 2) * deg.sum(-1)
        if self.ridge:
            edges = edges + (self.ridge / 4) * (W * W).sum((-1, -2))
        return Terms(
            fidelity=sum(squares) / 2,
            smoothness=(self.alpha / 2) * (W * self.counted(D)).sum((-1, -2)),
            barrier=-unit * self.beta * of(W).log(deg).sum(-1),
            sparsity=unit * edges,
        )

    def value(self, squares: Sequence[Array], D: Array, W: Array) -> Array:
        """Return J of each problem, (B,), from ``||M_i * (Psi - T_i)||_{Z_i}^2``, (B,) each, and (N, K, K)."""
        fidelity, *of_graphs = self.terms(squares, D, W)
        return fidelity + per_problem(sum(of_graphs), len(fidelity))

    def curvature(self, squares: Sequence[Array], W: Array, change: Array, D_step: Array, D_change: Array) -> Array:
        r"""Return ``s(new) - s(old) - <grad s(old), new - old>`` of :math:`s = f - h`, (B,), without its cancellations.

        .. math:: \tfrac12 \textstyle\sum_i \|M_i * \Delta\|_{Z_i}^2 + \alpha \langle w, d(\Delta) \rangle
                  + \alpha \langle w^+ - w, d(\Psi^+) - d(\Psi) \rangle, \qquad \Delta = \Psi^+ - \Psi

        Args:
            squares: ``||M_i * Delta||_{Z_i}^2``, (B,) each.
            W: the old graph.
            change: w+ - w.
            D_step: d(Delta).
            D_change: d(Psi+) - d(Psi).
        """
        of_graphs = (self.alpha / 2) * (W * D_step + change * D_change).sum((-1, -2))
        return sum(squares) / 2 + per_problem(of_graphs, len(squares[0]))

    def stationarity(self, gradient: Array, parts: Array, D: Array, W: Array) -> Stationarity:
        """Return how far (Psi, W) is from a stationary point of J.

        Args:
            gradient: squared norm of the gradient by Psi, (B,).
            parts: sum of the norms of what it is the sum of, (B,).
            D: (N, K, K).
            W: (N, K, K).
        """
        xp, problems = of(W), len(parts)
        inverse = self.beta / W.sum(-1)
        gain = inverse[..., :, None] + inverse[..., None, :]
        cost = self.costs(D) + self.ridge * W
        outside = set_diagonal((gain - cost) / (gain + cost), 0.0)
        worst = xp.amax(xp.where(W > 0, 0 * W, positive_part(outside)).reshape(problems, -1), -1)
        inside = (W * abs(cost - gain)).reshape(problems, -1).sum(-1) / (W * (cost + gain)).reshape(problems, -1).sum(
            -1
        )
        models = xp.where(parts > 0, gradient**0.5 / xp.where(parts > 0, parts, 1.0), 0 * parts)
        return Stationarity(models, xp.maximum(worst, inside))
