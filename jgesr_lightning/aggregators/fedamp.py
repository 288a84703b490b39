"""FedAMP: each client's model moves towards those that resemble it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import STARTS, Aggregate, Aggregator, Upload, complete, mix, note_self_weights
from jgesr_lightning.aggregators.geometry import cosines, sq_distances
from jgesr_lightning.checks import number, one_of
from jgesr_lightning.regularisers import Proximal, Regulariser


class FedAMP(Aggregator):
    r"""Attentive message passing (Huang et al., AAAI 2021, arXiv 2007.03797, Algorithm 1).

    .. math:: u_k = \Big(1 - \sum_{j \ne k} \xi_{kj}\Big) x_k + \sum_{j \ne k} \xi_{kj} x_j

    ``variant="paper"``: :math:`\xi_{kj} = \frac{a}{\sigma} \exp(-\|x_k - x_j\|^2 / \sigma)`, a gradient step of length
    a on :math:`\sum A(\|x_k - x_j\|^2)`, :math:`A(z) = 1 - \exp(-z/\sigma)`. It is an average only while the step is
    short enough; a row whose xi sum to more than one is scaled to sum to one (``info["shortened_rows"]`` counts them).

    ``variant="heuristic"``: HeurFedAMP, the authors' own proposal for deep networks:
    :math:`\xi_{kk}` = `self_weight`, and the rest is shared out in proportion to :math:`\exp(\sigma \cos(x_k, x_j))`.
    It is the default because squared distances between networks depend on their size and on the channel's noise: with a
    sigma that does not fit, "paper" silently becomes `local` (xi = 0) or an equal pull from everyone.

    Clients add :math:`\frac{\lambda}{2a} \|x - u_k\|^2` to their loss.

    Args:
        variant: "heuristic" or "paper".
        sigma: scale: sharpness of the attention in "heuristic" (25, as in public code), and in "paper" the squared
            distance over which attention falls by e.
        a: length of the server's step; in "heuristic" only the ratio lam/a has a meaning.
        lam: weight of the clients' pull. Public code has lam/a = 1/10^4, kept here with a = 1, for which "paper" stays
            an average of up to 26 clients at sigma 25.
        self_weight: weight of the client's own model in "heuristic"; None: 1/P for P participants.
        start: where local training starts: "own", from the client's own model, u_k being the anchor of the pull alone,
            as in the publication, whose output are the clients' own models; or "cloud", from u_k.
    """

    name: ClassVar[str] = "fedamp"

    def __init__(
        self,
        variant: str = "heuristic",
        sigma: float = 25.0,
        a: float = 1.0,
        lam: float = 1e-4,
        self_weight: float | None = None,
        start: str = "own",
    ) -> None:
        super().__init__()
        one_of("variant", variant, ("heuristic", "paper"))
        one_of("start", start, STARTS)
        number("sigma", sigma, above=0)
        number("a", a, above=0)
        number("lam", lam, at_least=0)
        if self_weight is not None:
            number("self_weight", self_weight, at_least=0, at_most=1)
            if variant == "paper":
                raise ValueError("self_weight has no part in variant 'paper', where the distances set it")
        self.variant, self.sigma, self.a, self.lam, self.self_weight = variant, sigma, a, lam, self_weight
        self.start = start

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return the pull to u_k, after the run's own proximal term if it has one."""
        own = (Proximal(self.lam / self.a),) if self.lam else ()
        return (*super().client_terms(proximal_mu), *own)

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return u_k in row k."""
        models = upload.received if upload.mask is None else complete(upload)
        info: dict[str, Any] = {}
        if self.variant == "paper":
            mixing, shortened = self._paper(sq_distances(models, upload.reduce))
            info["shortened_rows"] = shortened
        else:
            mixing = self._heuristic(cosines(models, upload.reduce))
        note_self_weights(self, mixing, info)
        return Aggregate(mix(upload, mixing), mixing, info)

    def _paper(self, distances: Tensor) -> tuple[Tensor, int]:
        attention = self.a / self.sigma * torch.exp(-distances / self.sigma)
        attention.fill_diagonal_(0)
        total = attention.sum(1, keepdim=True)
        attention /= total.clamp_min(1)
        attention.diagonal().copy_((1 - total.squeeze(1)).clamp_min(0))
        return attention, int((total > 1).sum())

    def _heuristic(self, similarity: Tensor) -> Tensor:
        count = len(similarity)
        if count == 1:
            return torch.ones_like(similarity)
        own = 1 / count if self.self_weight is None else self.self_weight
        logits = (self.sigma * similarity).fill_diagonal_(-torch.inf)
        return (1 - own) * torch.softmax(logits, dim=1) + own * torch.eye(count, dtype=similarity.dtype)
