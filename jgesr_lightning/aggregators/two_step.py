"""Two steps in turn: learn the clients' graph, filter their models over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jgesr_lightning.aggregators.learned_graph import JointlySolved
from jgesr_lightning.checks import number
from jgesr_lightning.solvers import Alternating


@dataclass(eq=False, repr=False, kw_only=True)
class TwoStep(JointlySolved):
    """Alternate graph learning (to convergence) and graph filtering (in closed form) until the models stand still.

    The paper's two-step baseline: the same joint objective as `JGESR`, minimised over one of its arguments at a time.
    Its settings: see `JointlySolved` and `LearnedGraph`; and

    Args:
        gamma: positive unless `neighbours` stands in for it, or an edge between equal models would cost nothing.
        max_iter: stop after that many rounds of both steps, 1 being one graph and one filtering.

    Raises:
        ValueError: a setting out of range, with its name.
    """

    name: ClassVar[str] = "two_step"

    max_iter: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours is None:
            number("gamma", self.gamma, above=0)

    def solver(self) -> Alternating:
        """See `JointlySolved`."""
        return Alternating(self.eps, self.max_iter, self.stop)
