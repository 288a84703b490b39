"""Read the two pickles that data sets come in without running what a pickle could run."""

from __future__ import annotations

import codecs
import pickle
from typing import IO, Any

import numpy as np

# The function by which numpy arrays are pickled; asked of numpy, since its module was renamed between versions.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]

ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows plain containers and numpy arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the allowed functions, or raise UnpicklingError."""
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which no array needs") from None


def load_arrays(file: IO[bytes]) -> Any:
    """Return what a pickle holds, Python 2 pickles included (their texts as latin-1).

    Raises:
        pickle.UnpicklingError: it holds anything but plain containers and numpy arrays.

    """
    return ArrayUnpickler(file, encoding="latin1").load()
