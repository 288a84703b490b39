r"""The joint problem: one object that says what is minimised, and that everything asks which needs to know.

.. math:: J(\Psi, w) = \underbrace{\tfrac\mu2 \|M * \Psi - X_r\|_Z^2}_{\text{fidelity}}
          + \underbrace{\alpha \textstyle\sum_e w_e d_e(\Psi)}_{\text{smoothness}}
          \underbrace{- \beta \textstyle\sum_k \log \deg_k(w)}_{\text{barrier}}
          + \underbrace{\gamma \textstyle\sum_e w_e}_{\text{sparsity}}, \qquad w \ge 0

Sums over e run over edges, each pair of clients once; W is symmetric with zero diagonal and holds every edge twice.

Under `neighbours` the graph's own terms are those of Kalofolias and Perraudin (ICLR 2019), :math:`u\,(-\beta \sum \log
\deg + \frac12 \|w\|^2)`: a quadratic in place of the sum, without which a minimiser has hardly more edges than nodes,
and a unit u (one for each graph) that follows the size of the distances, so that what minimises J follows the data's
scale.

At the end, J and its gradients as functions of the K x d models, in float64: differentiable, batched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, of, positive_part, set_diagonal
from jgesr_lightning.graph.gram import pairwise_sq_distances
from jgesr_lightning.graph.laplacian import check_models, laplacian, pairs
from jgesr_lightning.graph.learning import learn, neighbour_scale
from jgesr_lightning.graph.prox import Prox, prox

SMOOTHINGS = ("full", "printed")
APART = 1e6
"""An edge between groups costs that many times what others do: none, in effect, for those who have others."""


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
    """The constants and terms of J. K x K numbers are (B, G, K, K) arrays: B problems with G graphs each.

    Attributes:
        alpha, beta, gamma, mu: weights of smoothness, log barrier, sum of the edges, and fidelity.
        smoothing: "full": models descend along the gradient of J, 2 alpha L Psi. "printed": along alpha L Psi, the
            operator that the paper prints for them, half of what its closed form and its graph step imply.
        ridge: weight of half the squared weights of the edges; see the module.
        unit: of the graph's own terms, a number or (B, G, 1, 1).
        noise: what is taken from the distances before the graph is learnt, 0.0 or (B, G, K, K); never below zero.
            None: the least distance at the start, the closest pair being taken to differ by noise alone.
        neighbours: about how many edges a node is to have at the start: sets ridge, gamma and unit; see the module.
        surcharge: what an edge costs beyond its distance and gamma, in the graph's unit: 0.0 or (B, G, K, K).
        together: 1.0 for pairs of nodes of one group, else 0, (K, K): the graph does not tell them apart, each counts
            at the mean of their distances, so that their edges stay alike; and has next to no edges between groups,
            whose surcharge is set at the start. None: all count alone.
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
    surcharge: float | Array = 0.0
    together: Array | None = None
    pulls: tuple[Pull, ...] = ()

    but = replace  # this problem with some of its parts replaced

    def pulled(self, received: Tensor, weights: Tensor, mask: Tensor | None = None) -> Problem:
        """Return this problem for what arrived, Z = diag(weights). A further quadratic in Psi is one more `Pull`."""
        return self.but(pulls=(Pull(received, self.mu * weights.to(received.device, torch.float64), mask),))

    def scaled_to(self, D: Array) -> Problem:
        """Return this problem with what it takes from the distances at the start, (B, G, K, K)."""
        problem = self
        if self.noise is None:
            problem = self.but(noise=of(D).amin(set_diagonal(D * 1, math.inf), (-1, -2), keepdims=True))
        if self.together is not None:
            costs = problem.costs(D)
            mean = costs.mean((-1, -2))[..., None, None]
            across = set_diagonal(1 - self.together, 0.0)
            problem = problem.but(surcharge=APART * of(D).where(mean > 0, mean, 1.0) * across)
        if self.neighbours is None:
            return problem
        theta = neighbour_scale(problem.counted(D), self.neighbours)
        return problem.but(ridge=1.0, gamma=0.0, unit=self.alpha / (self.beta**0.5 * theta))

    def operator(self, W: Array) -> Array:
        """Return S of the gradient's smoothing part S Psi, (B, G, K, K): 2 alpha L."""
        return (2 if self.smoothing == "full" else 1) * self.alpha * laplacian(W)

    @staticmethod
    def gradient_models(
        psi: Array, S: Array, weights: Iterable[Array], away: Iterable[Array], out: Tensor | None = None
    ) -> Array:
        """Return ``sum_i Z_i M_i * (Psi - T_i) + S Psi``, (..., K, n), in whatever n columns Psi is held.

        `S` is that of `operator`; `weights` and `away` hold Z_i (..., K, 1) and ``M_i * (Psi - T_i)`` of each pull;
        `out` is memory for the result, if there is some.
        """
        gradient = S @ psi if out is None else torch.matmul(S, psi, out=out)
        for weight, difference in zip(weights, away, strict=True):
            # A tensor may be of d columns: no temporary.
            tensor = isinstance(gradient, Tensor)
            gradient = gradient.addcmul_(weight, difference) if tensor else gradient + weight * difference
        return gradient

    def counted(self, D: Array) -> Array:
        """Return the distances that the graph is learnt from."""
        if self.together is None and isinstance(self.noise, float):
            return D
        return set_diagonal(positive_part(self.pooled(D if isinstance(self.noise, float) else D - self.noise)), 0.0)

    def pooled(self, numbers: Array) -> Array:
        """Return numbers of pairs, (B, G, K, K), in which those of all pairs `together` are their mean."""
        if self.together is None:
            return numbers
        pairs = self.together.sum()
        mean = (numbers * self.together).sum((-1, -2))[..., None, None] / of(numbers).where(pairs > 0, pairs, 1.0)
        return of(numbers).where(self.together > 0, mean, numbers)

    def costs(self, D: Array) -> Array:
        """Return what an edge's weight costs, (B, G, K, K), without barrier and ridge, in the graph's unit."""
        cost = (self.alpha / self.unit) * self.counted(D) + self.gamma
        return cost if isinstance(self.surcharge, float) else cost + self.surcharge

    def first_graph(self, cosines: Array, D: Array) -> Array:
        """Return where the graph starts, (B, G, K, K): max(0, cosine similarity), as printed.

        Where pairs count `together`: the graph of the models as they are, since many edges of weight one would be too
        much for a fixed step.
        """
        if self.together is not None:
            return self.learnt_graph(D, careful=True).W
        return set_diagonal(positive_part(cosines), 0.0)

    def balance(self, D: Array, W: Array) -> tuple[Array, Array]:
        """Return what each edge's weight gains and costs, (B, G, K, K): J's derivative by it is cost less gain."""
        return pairs(self.beta / W.sum(-1)), self.costs(D) + self.ridge * W

    def prox_graph(self, W: Array, D: Array, rho: float | Array, dual: Array | None, *, careful: bool = False) -> Prox:
        r"""Return :math:`\mathrm{prox}_{g/\rho}(w - \frac\alpha\rho d(\Psi))`, g and rho in their unit."""
        whole = rho + self.ridge
        return prox((rho * W - self.costs(D)) / whole, self.beta, 0.0, whole, dual, careful=careful)

    def learnt_graph(self, D: Array, *, careful: bool = False) -> Prox:
        """Return the minimiser of J over the graph, for given models."""
        if self.ridge:
            return self.prox_graph(0 * D, D, 0.0, None, careful=careful)
        return learn(self.costs(D), self.beta)

    def value(self, squares: Sequence[Array], D: Array, W: Array) -> Array:
        """Return J of each problem, (B,), from ``||M_i * (Psi - T_i)||_{Z_i}^2``, (B,) each, and (B, G, K, K)."""
        barrier = self.unit * self.beta * of(W).log(W.sum(-1, keepdims=True))
        cost = self.costs(D) + self.ridge / 2 * W if self.ridge else self.costs(D)
        edges = W * (self.unit * cost)  # each twice
        return (sum(squares) + edges.sum((-1, -2, -3))) / 2 - barrier.sum((-1, -2, -3))

    def curvature(self, squares: Sequence[Array], W: Array, change: Array, D_step: Array, D_change: Array) -> Array:
        r"""Return ``s(new) - s(old) - <grad s(old), new - old>`` of :math:`s = f - h`, (B,), without its cancellations.

        .. math:: \tfrac12 \textstyle\sum_i \|M_i * \Delta\|_{Z_i}^2 + \alpha \langle w, d(\Delta) \rangle
                  + \alpha \langle w^+ - w, d(\Psi^+) - d(\Psi) \rangle, \qquad \Delta = \Psi^+ - \Psi

        from ``||M_i * Delta||_{Z_i}^2``, (B,) each, w, ``w+ - w``, ``d(Delta)`` and ``d(Psi+) - d(Psi)``.
        """
        return sum(squares) / 2 + (self.alpha / 2) * (W * D_step + change * D_change).sum((-1, -2, -3))

    def stationarity(self, gradient: Array, parts: Array, D: Array, W: Array) -> Stationarity:
        """Return how far (Psi, W) is from a stationary point of J.

        `gradient` is the squared norm of the gradient by Psi, `parts` the sum of the norms of its parts, (B,) each.
        """
        xp, by_problem = of(W), (len(parts), -1)
        gain, cost = self.balance(D, W)
        outside = set_diagonal((gain - cost) / (gain + cost), 0.0)
        worst = xp.where(W > 0, 0.0, positive_part(outside)).reshape(by_problem)
        unmet, terms = ((W * part).reshape(by_problem).sum(-1) for part in (abs(cost - gain), cost + gain))
        length = positive_part(gradient) ** 0.5  # a sum of cancelled squares may round to less than nothing
        models = xp.where(parts > 0, length / xp.where(parts > 0, parts, 1.0), 0.0)
        return Stationarity(models, xp.maximum(xp.amax(worst, -1), unmet / terms))


def objective(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None,
    alpha: float, beta: float, gamma: float, mu: float,
) -> Tensor:  # fmt: skip
    r"""Return J, (...,) float64.

    The fidelity is literally :math:`\frac\mu2 \sum_{kj} z_k (M_{kj} \psi_{kj} - x_{kj})^2`: what `received` holds where
    the mask is False counts, as in the paper, where it is noise that no Psi can change. The solvers leave it out, so
    their traces agree with this function where `received` is zero at the gaps.

    `Psi` and `received` are (..., K, d); `W` (..., K, K) symmetric, non-negative, with zero diagonal: a client without
    edges makes the barrier infinite; `weights`, the diagonal of Z, (K,) or (..., K), as they are (not normalised here);
    `mask` (..., K, d) bool, or None where everything arrived. The constants are those of `Problem`.

    Raises:
        ValueError: an argument of the wrong type or shape, with its name.
    """
    check_models("Psi", Psi, W=W, received=received, weights=weights, mask=mask)
    squares = (_residual(Psi, received, mask).square().sum(-1) * weights.to(Psi.device, torch.float64)).sum(-1)
    graphs = (one[..., None, :, :] for one in (pairwise_sq_distances(Psi), W.double()))
    value: Tensor = Problem(alpha, beta, gamma).value([mu * squares], *graphs)
    return value


def gradient_signals(
    Psi: Tensor, W: Tensor, received: Tensor, weights: Tensor, mask: Tensor | None, alpha: float, mu: float
) -> Tensor:
    r"""Return :math:`\partial J / \partial \Psi = \mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi`: (..., K, d)."""
    away, z = _residual(Psi, received, mask), mu * weights.to(Psi.device, torch.float64)[..., None]
    away = away if mask is None else away * mask
    # L does not see what all rows share, whose digits would drown the differences.
    apart = Psi.double() - Psi.double().mean(-2, keepdim=True)
    gradient: Tensor = Problem.gradient_models(apart, Problem(alpha).operator(W.double()), [z], [away])
    return gradient


def gradient_graph(Psi: Tensor, W: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    r"""Return :math:`\partial J / \partial w_{mn} = \alpha d_{mn}(\Psi) - \beta (1/\deg_m + 1/\deg_n) + \gamma`.

    The derivative by an *edge* (both of its entries in W together): (..., K, K) float64, zero diagonal.
    """
    gain, cost = Problem(alpha, beta, gamma).balance(pairwise_sq_distances(Psi), W.double())
    gradient: Tensor = set_diagonal(cost - gain, 0.0)
    return gradient


def _residual(Psi: Tensor, received: Tensor, mask: Tensor | None) -> Tensor:
    return (Psi.double() if mask is None else torch.where(mask, Psi.double(), 0)) - received.double()
