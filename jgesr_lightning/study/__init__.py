"""A study: methods x data sets x noise levels x missing rates x seeds, each combination an ordinary run.

``cells`` reads a study's file, ``processes`` starts a cell, ``runner`` runs them, ``command`` is the command line.
"""

from jgesr_lightning.study.cells import Cell, choose, find_study, load_study, parse_part

__all__ = ["Cell", "choose", "find_study", "load_study", "parse_part"]
