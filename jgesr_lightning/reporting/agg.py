"""Matplotlib, imported whatever MPLBACKEND names; pictures are drawn with Agg in any case.

A notebook exports MPLBACKEND to the programs it starts. Where they run in an environment without the notebook's own
packages, matplotlib refuses that name while it is imported.
"""

from __future__ import annotations

import os

__all__ = ["mpl"]

VARIABLE = "MPLBACKEND"

_named = os.environ.pop(VARIABLE, None)
try:
    import matplotlib as mpl
finally:
    if _named is not None:
        os.environ[VARIABLE] = _named
