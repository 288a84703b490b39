from typing import ClassVar

import torch

from jgesr_lightning.aggregators import Aggregate, Aggregator, Upload
from jgesr_lightning.aggregators.base import complete
from jgesr_lightning.checks import number


class TrimmedMean(Aggregator):
    """Mean of each coordinate without its largest and smallest values (Yin et al., ICML 2018).

    Args:
        trim: share of the clients that is left out at either end, below a half.
    """

    name: ClassVar[str] = "trimmed_mean"
    min_clients: ClassVar[int] = 3

    def __init__(self, trim: float = 0.2) -> None:
        super().__init__()
        number("trim", trim, at_least=0, at_most=0.49)
        self.trim = trim

    def aggregate(self, upload: Upload) -> Aggregate:
        models, count = complete(upload), len(upload.clients)
        out = int(self.trim * count)
        middle = models.sort(0).values[out : count - out].mean(0)
        graph = torch.full((count, count), 1 / count, dtype=torch.float64)
        return Aggregate(middle.repeat(count, 1), graph, {"left_out": 2 * out})
