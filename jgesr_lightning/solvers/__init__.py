"""Solvers of the joint problem: the proximal DC algorithm, and alternating minimisation; they know only `graph`."""

from jgesr_lightning.solvers.alternating import Alternating
from jgesr_lightning.solvers.coefficients import Coefficients
from jgesr_lightning.solvers.masked import Masked
from jgesr_lightning.solvers.pdca import PDCA, State
from jgesr_lightning.solvers.reference import pdca_as_printed
from jgesr_lightning.solvers.signals import Moments, Signals, Start
from jgesr_lightning.solvers.solution import Penalties, Solution

__all__ = [
    "PDCA",
    "Alternating",
    "Coefficients",
    "Masked",
    "Moments",
    "Penalties",
    "Signals",
    "Solution",
    "Start",
    "State",
    "pdca_as_printed",
]
