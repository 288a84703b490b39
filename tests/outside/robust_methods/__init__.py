"""A package of somebody else's: two aggregations that take no part in jgesr_lightning, as a user would write them."""

from robust_methods.krum import Krum
from robust_methods.trimmed import TrimmedMean

__all__ = ["Krum", "TrimmedMean"]
