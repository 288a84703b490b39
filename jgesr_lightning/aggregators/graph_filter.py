"""Plain graph filter: the graph is learnt once from the uploads, which are then smoothed over it; no joint step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Upload, complete
from jgesr_lightning.aggregators.geometry import sq_distances
from jgesr_lightning.aggregators.learned_graph import LearnedGraph, edges
from jgesr_lightning.graph import filter_signals, gradient_signals, learn_graph
from jgesr_lightning.graph.arrays import enter, leave
from jgesr_lightning.graph.gram import chunks
from jgesr_lightning.graph.problem import Problem, Stationarity
from jgesr_lightning.graph.prox import QUIET


@dataclass(eq=False, repr=False, kw_only=True)
class GraphFilter(LearnedGraph):
    r"""One pass of graph learning (Kalofolias, AISTATS 2016) and one of graph filtering: an ablation of `jgesr`.

    .. math::
        W = \arg\min_{w \ge 0} \alpha \langle w, d(X) \rangle - \beta \sum_k \log \deg_k(w) + \gamma 1^\top w, \qquad
        \Psi = (Z + \tfrac{2\alpha}{\mu} L)^{-1} Z X

    Missing entries carry no fidelity: Psi minimises ``mu/2 ||M * (Psi - X)||_Z^2 + alpha tr(Psi' L Psi)``, and a gap is
    filled by the neighbours. A coordinate that nobody delivered keeps its previous value.

    Its settings: see `LearnedGraph`.
    """

    name: ClassVar[str] = "graph_filter"

    def aggregate(self, upload: Upload) -> Aggregate:
        """Return the filtered models and the learnt graph."""
        models = upload.received if upload.mask is None else complete(upload)
        aim, distances = self.aimed(upload), sq_distances(models, upload.reduce)
        noise = self.noise(upload) if aim is None else distances - aim.distances
        D = enter(distances[None])
        with QUIET():
            problem = self.posed(upload, noise, distances.device).scaled_to(D)
            extra = 0.0 if problem.together is None else problem.surcharge / self.alpha
            costly = leave(problem.counted(D) + extra)[0]
        graph = learn_graph(costly, self.alpha, self.beta, self.gamma, neighbours=problem.neighbours)
        z = self.weights(upload)
        smooth = filter_signals(models, graph, z, self.alpha, self.mu, mask=upload.mask, start=models)
        if upload.mask is not None:
            smooth = torch.where(upload.mask.any(0), smooth, models)
        left = self._stationarity(problem, models, smooth, graph, upload)
        info = {"edges": edges(graph), "fidelity": self.fidelity}
        info |= {} if self.grouping is None else self.grouping.info()
        info |= {f"stationarity_{block}": float(failure[0]) for block, failure in left._asdict().items()}
        return self.with_own(Aggregate(smooth, graph, info), upload, graph[None], None)

    def _stationarity(
        self, problem: Problem, models: Tensor, smooth: Tensor, graph: Tensor, upload: Upload
    ) -> Stationarity:
        """Return how far the filtered models and their graph are from a stationary point of J."""
        z, squares = self.weights(upload), torch.zeros(3, dtype=torch.float64, device=models.device)
        graph_there = graph.to(models.device)
        for _, columns in chunks(smooth.shape[1:], 4 * len(smooth), smooth.device):
            psi, received = smooth[:, columns], models[:, columns]
            mask = None if upload.mask is None else upload.mask[:, columns]
            received = received if mask is None else torch.where(mask, received, 0)
            pull = gradient_signals(psi, graph_there, received, z, mask, 0.0, problem.mu)
            smoothing = gradient_signals(psi, graph_there, received, 0 * z, mask, problem.alpha, problem.mu)
            squares += torch.stack([part.square().sum() for part in (pull + smoothing, pull, smoothing)])
        whole, *parts = enter(upload.reduce(squares).cpu())[:, None]
        D, W = enter(sq_distances(smooth, upload.reduce)[None]), enter(graph[None])
        with QUIET():
            return problem.stationarity(whole, sum(part**0.5 for part in parts), D, W)
