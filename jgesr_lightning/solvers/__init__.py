"""Solvers of the joint problem: the proximal DC algorithm, and alternating minimisation; they know only `graph`."""

from jgesr_lightning.solvers.alternating import Alternating
from jgesr_lightning.solvers.models import Models
from jgesr_lightning.solvers.pdca import PDCA
from jgesr_lightning.solvers.solver import Solution, State

__all__ = ["PDCA", "Alternating", "Models", "Solution", "State"]
