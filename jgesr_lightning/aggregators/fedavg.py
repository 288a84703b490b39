"""FedAvg and FedProx: one model for all, the mean weighted by shares of training samples."""

from __future__ import annotations

from typing import ClassVar

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload, mix
from jgesr_lightning.checks import number
from jgesr_lightning.regularisers import Proximal, Regulariser


class FedAvg(Aggregator):
    """``psi_k = sum_j zeta_j x_j`` (McMahan et al., AISTATS 2017, Algorithm 1), over what arrived."""

    name: ClassVar[str] = "fedavg"

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return the weighted mean in every row."""
        count = len(upload.clients)
        mixing = upload.weights.expand(count, count).clone()
        return Aggregate(mix(upload, mixing), mixing)


class FedProx(FedAvg):
    """FedAvg whose clients add ``mu_prox/2 ||x - psi_k||^2`` to their loss (Li et al., MLSys 2020, Algorithm 2).

    Args:
        mu_prox: proximal weight; the run's `local.proximal_mu`, where given, replaces it. The publication tunes it
            among 0.001, 0.01, 0.1 and 1.
    """

    name: ClassVar[str] = "fedprox"

    def __init__(self, mu_prox: float = 0.01) -> None:
        super().__init__()
        number("mu_prox", mu_prox, at_least=0)
        self.mu_prox = mu_prox

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return the proximal term; `proximal_mu` None means `mu_prox`."""
        mu = self.mu_prox if proximal_mu is None else proximal_mu
        return (Proximal(mu),) if mu else ()
