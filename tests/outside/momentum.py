"""A method of somebody else's that draws at random and keeps a number a parameter, as a user would write it."""

from typing import Any, ClassVar

import torch

from jgesr_lightning.aggregators import Aggregate, Aggregator, Upload
from jgesr_lightning.aggregators.base import complete


class Momentum(Aggregator):
    """The mean of three clients drawn at random, with momentum on the server."""

    name: ClassVar[str] = "momentum"
    column_state: ClassVar[tuple[str, ...]] = ("velocity",)

    def __init__(self, beta: float = 0.5) -> None:
        super().__init__()
        self.beta = beta
        self.velocity: torch.Tensor | None = None

    def aggregate(self, upload: Upload) -> Aggregate:
        models = complete(upload)
        count = len(models)
        chosen = torch.randperm(count)[:3]
        mixing = torch.zeros(count, count, dtype=torch.float64)
        mixing[:, chosen] = 1 / 3
        assert upload.previous is not None
        step = models[chosen].mean(0) - upload.previous[0]
        self.velocity = step if self.velocity is None else self.beta * self.velocity + step
        return Aggregate((upload.previous[0] + self.velocity).repeat(count, 1), mixing)

    def state(self) -> dict[str, Any]:
        return {"velocity": self.velocity, "kept": [self.beta, "beta", None]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.velocity = state["velocity"]


class Undeclared(Momentum):
    """The same, which does not say that its velocity has a column a parameter."""

    column_state: ClassVar[tuple[str, ...]] = ()
