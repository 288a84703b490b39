import torch

from jgesr_lightning.aggregators import Aggregate, Aggregator, Upload
from jgesr_lightning.aggregators.base import complete
from jgesr_lightning.aggregators.geometry import sq_distances


class Krum(Aggregator):
    """The model nearest to its neighbours (Blanchard et al., NeurIPS 2017).

    Args:
        byzantine: number of clients that may be anything.
        scale: None, or what the chosen model is multiplied by; an odd setting, to have an optional one.
    """

    def __init__(self, byzantine: int, scale: float | None = None):
        super().__init__()
        if byzantine < 0:
            raise ValueError(f"byzantine is {byzantine}; it must be at least 0")
        self.byzantine, self.scale = byzantine, scale

    def aggregate(self, upload: Upload) -> Aggregate:
        models, count = complete(upload), len(upload.clients)
        nearest = max(1, count - self.byzantine - 2)
        distances = sq_distances(models, upload.reduce)
        scores = distances.sort(1).values[:, 1 : 1 + nearest].sum(1)
        chosen = int(scores.argmin())
        graph = torch.zeros(count, count, dtype=torch.float64)
        graph[:, chosen] = 1
        model = models[chosen] * (1 if self.scale is None else self.scale)
        return Aggregate(model.repeat(count, 1), graph, {"chosen": chosen})
