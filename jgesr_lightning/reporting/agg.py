"""Matplotlib, imported whatever MPLBACKEND names; pictures are drawn with Agg in any case.

A notebook exports MPLBACKEND to the programs it starts. Where they run in an environment without the notebook's own
packages, matplotlib refuses that name while it is imported. So all of matplotlib that is used is imported here.
"""

from __future__ import annotations

import os

__all__ = [
    "Axes",
    "Bbox",
    "ConstrainedLayoutEngine",
    "Figure",
    "FigureCanvasAgg",
    "LinearSegmentedColormap",
    "MaxNLocator",
    "Rectangle",
    "TransformedBbox",
    "Wedge",
    "mpl",
]

VARIABLE = "MPLBACKEND"

_named = os.environ.pop(VARIABLE, None)
try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Rectangle, Wedge
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import Bbox, TransformedBbox
finally:
    if _named is not None:
        os.environ[VARIABLE] = _named
