"""Joint graph estimation and signal restoration: learn the clients' graph and smooth their models over it, at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jgesr_lightning.aggregators.learned_graph import JointlySolved
from jgesr_lightning.checks import flag, number, one_of
from jgesr_lightning.graph.problem import SMOOTHINGS
from jgesr_lightning.solvers import PDCA

STEPS = ("fixed", "backtracking")


@dataclass(eq=False, repr=False, kw_only=True)
class JGESR(JointlySolved):
    """The method of "Joint Graph Estimation and Signal Restoration for Robust Federated Learning" (MLSP 2025).

    Minimises J(Psi, w) of `jgesr_lightning.graph` over models and graph by `jgesr_lightning.solvers.PDCA`. Where every
    entry arrived the iteration is K x K and the parameters are read twice in all; with gaps it is so for the columns of
    common patterns of gaps, and one pass a step over the others. Its settings: see `JointlySolved` and `LearnedGraph`;
    and

    Args:
        rho: inverse step (the first one, under backtracking).
        step: "fixed" (as printed) or "backtracking" (rho grows until J cannot rise; it may under smoothing="printed").
        accelerated: extrapolate, with restart.
        smoothing: "full": models descend along the gradient of J, 2 alpha L Psi; "printed": along alpha L Psi, the
            operator that the paper prints for them, half of what its closed form implies: an ablation.

    Raises:
        ValueError: a setting out of range, with its name.
    """

    name: ClassVar[str] = "jgesr"
    repeated: ClassVar[tuple[str, ...]] = ("step", *JointlySolved.repeated, "smoothing")

    rho: float = 1.0
    step: str = "fixed"
    accelerated: bool = False
    smoothing: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        number("rho", self.rho, above=0)
        one_of("step", self.step, STEPS)
        flag("accelerated", self.accelerated)
        one_of("smoothing", self.smoothing, SMOOTHINGS)
        self.problem = self.problem.but(smoothing=self.smoothing)

    def solver(self) -> PDCA:
        """See `JointlySolved`."""
        return PDCA(self.eps, self.max_iter, self.stop, self.rho, self.step == "backtracking", self.accelerated)
