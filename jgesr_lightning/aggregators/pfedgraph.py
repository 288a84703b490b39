"""pFedGraph: each client's averaging weights trade similarity of updates against shares of the data."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload, complete, mix, note_self_weights
from jgesr_lightning.aggregators.geometry import cosines
from jgesr_lightning.checks import number
from jgesr_lightning.regularisers import CosineDissimilarity, Regulariser


class PFedGraph(Aggregator):
    r"""pFedGraph (Ye et al., "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023).

    With the dissimilarity of updates :math:`\delta_{kj} = -\cos(x_k - x^{(0)}, x_j - x^{(0)})`, client k's weights are

    .. math:: \arg\min_{a \ge 0,\, 1^\top a = 1} \; \langle a, \delta_k \rangle + \lambda \|a - \zeta\|^2,

    that is, the projection of :math:`\zeta - \delta_k / (2 \lambda)` on the simplex, and ``psi_k = sum_j a_kj x_j``.
    The limit lam = 0 keeps the most similar models only, which is the client's own unless others are parallel to it;
    large lam is FedAvg. A client whose model has not moved has no direction, hence FedAvg's weights.

    Clients add ``-lam_local cos(x, psi_k)`` to their loss.

    The authors' code (github.com/MediaBrain-SJTU/pFedGraph, PyTorch) differs in four things: cosines above 0.9 count as
    1; the local term is the inner product of x / ||x|| with ``sum_j a_kj x_j / ||x_j||``, each neighbour normalised by
    itself; it enters the loss with a plus, which drives x away from its neighbours; and it is left out in the first
    round. Here the text of the publication is followed.

    Args:
        lam: trade-off, 0.8 as published.
        lam_local: weight of the clients' dissimilarity term, 0.01 as published.
    """

    name: ClassVar[str] = "pfedgraph"
    needs: tuple[str, ...] = ("initial",)

    def __init__(self, lam: float = 0.8, lam_local: float = 0.01) -> None:
        super().__init__()
        number("lam", lam, at_least=0)
        number("lam_local", lam_local, at_least=0)
        self.lam, self.lam_local = lam, lam_local

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return the dissimilarity term, after the run's proximal term if it has one."""
        own = (CosineDissimilarity(self.lam_local),) if self.lam_local else ()
        return (*super().client_terms(proximal_mu), *own)

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return each client's weighted mean; the collaboration graph is the mixing matrix."""
        models = upload.received if upload.mask is None else complete(upload)
        similarity = cosines(models, upload.reduce, minus=upload.initial)
        mixing = collaboration_graph(-similarity, upload.weights, self.lam)
        info: dict[str, Any] = {}
        note_self_weights(self, mixing, info)
        return Aggregate(mix(upload, mixing), mixing, info)


def collaboration_graph(delta: Tensor, shares: Tensor, lam: float) -> Tensor:
    """Return ``argmin_a <a_k, delta_k> + lam ||a_k - shares||^2`` over the simplex, for every row k.

    Args:
        delta: (..., K) float64 dissimilarities.
        shares: (K,) float64.
        lam: at least 0; 0 is the limit from above (the smallest delta only; ties share by projection of `shares`).
    """
    # Only differences matter on the simplex; taken from the smallest, they keep their digits for any lam.
    gap = delta - delta.amin(-1, keepdim=True)
    gap = torch.where(gap < 1e-14, 0, gap)  # rounding of the cosines: a tie
    penalty = torch.where(gap > 0, gap / (2 * lam) if lam > 0 else torch.inf, 0)
    return project_simplex(shares - penalty)


def project_simplex(v: Tensor) -> Tensor:
    """Return ``argmin ||a - v||`` over ``a >= 0, sum a = 1`` along the last dimension (Held, Wolfe and Crowder 1974).

    Entries of -inf become 0; at least one entry must be finite.
    """
    ordered = v.sort(dim=-1, descending=True).values
    rank = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    excess = (ordered.cumsum(-1) - 1) / rank
    support = (ordered > excess).sum(-1, keepdim=True)
    return (v - excess.gather(-1, support - 1)).clamp_min(0)
