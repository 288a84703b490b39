"""Arrays out of .npz files of other people's: nothing is unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jgesr_lightning.data.dataset import DataError

LIMIT = 64 << 30  # bytes of all arrays together: a compressed file may claim any number


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a .npz file by their names, in the file's order.

    Raises:
        DataError: there is no such file, it is damaged, or an array holds Python objects, which would be unpickled.

    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > LIMIT:
            raise DataError(f"{path} says that it holds {size:,} bytes, more than {LIMIT:,}")
        with np.load(path, allow_pickle=False) as content:
            return {name: np.asarray(content[name]) for name in content.files}
    except DataError:
        raise
    except Exception as error:  # zip files and headers can be damaged in any way
        reason = " ".join(str(error).split())[:120]
        if "allow_pickle" in reason or "Object arrays" in reason:
            reason = "an array in it holds Python objects; save plain numbers or texts"
        raise DataError(f"{path} cannot be read as .npz ({reason or type(error).__name__})") from error
