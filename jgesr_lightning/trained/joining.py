r"""A client that comes after the run joins the learned graph by one more node; the others, and their edges, stay.

Of the objective J (see `jgesr_lightning.graph`) with K + 1 clients only what the newcomer has a part in is left: its
weights w, (K,), to the others and its model psi,

.. math:: \frac{\mu z}{2} \|\psi - x\|^2 + \sum_k (\alpha \|\psi - \psi_k\|^2 + \gamma) w_k
          - \beta \log \textstyle\sum_k w_k - \beta \sum_k \log(\deg_k + w_k), \qquad w \ge 0,

convex in w for a given model and in psi for given weights. The weights are found for its trained model x, and psi is
then the minimiser for these weights: x and its neighbours' models, averaged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def edge_weights(sq_distances: Tensor, degrees: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    r"""Return the newcomer's weights, (K,) float64.

    For a given sum s of the weights each follows from its own derivative,
    :math:`w_k(s) = \max(0, \beta / c_k(s) - \deg_k)` with :math:`c_k(s) = \alpha d_k + \gamma - \beta / s`, which falls
    with s; the sum that reproduces itself is found by bisection.

    Args:
        sq_distances: (K,) squared distances from the newcomer's model to the others'.
        degrees: (K,) degrees of the others in their graph.
        alpha: weight of the smoothness, at least 0.
        beta: weight of the log barrier, above 0.
        gamma: weight of the sum of the edges; alpha d + gamma must be positive.

    Raises:
        ValueError: an edge that costs nothing, which would have no bound; or a distance that is no finite number.
    """
    costs = alpha * sq_distances.to(torch.float64) + gamma
    degrees = degrees.to(torch.float64)
    if not bool(costs.isfinite().all()):
        raise ValueError("the newcomer's model is not at a finite distance from each client's: one of them diverged")
    if not bool((costs > 0).all()):
        raise ValueError("gamma is 0 and a client's model is the newcomer's own: their edge would cost nothing")

    def weights(total: Tensor) -> Tensor:
        price = costs - beta / total
        bounded = beta / price.clamp_min(torch.finfo(torch.float64).tiny) - degrees
        return torch.where(price > 0, bounded.clamp_min(0), torch.inf)

    # at the upper end every price is at least half an edge's cost, and so their sum below that end
    low, high = torch.zeros(()).to(costs), 2 * beta * len(costs) / costs.min()
    for _ in range(200):
        middle = (low + high) / 2
        if bool(weights(middle).sum() > middle):
            low = middle
        else:
            high = middle
    return weights(high)


def joined_model(x: Tensor, weights: Tensor, models: Tensor, alpha: float, mu: float, share: float) -> Tensor:
    r"""Return :math:`(\mu z x + 2 \alpha \sum_k w_k \psi_k) / (\mu z + 2 \alpha \sum_k w_k)`, (d,) in the type of `x`.

    Args:
        x: (d,) the newcomer's trained model.
        weights: (K,) its edges.
        models: (K, d) the others' models.
        alpha: weight of the smoothness.
        mu: weight of the fidelity.
        share: z, the newcomer's entry of the diagonal of Z.
    """
    pull = 2 * alpha * weights.to(torch.float64)
    neighbours = pull @ models.to(torch.float64)
    result: Tensor = (mu * share * x.to(torch.float64) + neighbours) / (mu * share + pull.sum())
    return result.to(x.dtype)
