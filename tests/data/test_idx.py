import gzip

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.data.idx import read_idx, to_idx


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3)), st.booleans())
def test_round_trip(tmp_path_factory, array, compressed):
    path = tmp_path_factory.mktemp("idx") / ("x.gz" if compressed else "x")
    path.write_bytes(gzip.compress(to_idx(array)) if compressed else to_idx(array))
    assert torch.equal(read_idx(path, array.ndim), torch.from_numpy(array))


def test_header_as_published():
    assert to_idx(np.zeros((2, 28, 28), np.uint8))[:16] == bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28])


GOOD = to_idx(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))


DAMAGED = {
    "cut": GOOD[:-1],
    "long": GOOD + b"x",
    "empty": b"",
    "header": GOOD[:10],
    "other": b"<html>not found</html>",
    "labels": to_idx(np.arange(3, dtype=np.uint8)),
    "cut.gz": gzip.compress(GOOD)[:-6],
    "other.gz": b"<html>not found</html>",
    "flipped.gz": gzip.compress(GOOD)[:-8] + b"abcd" + gzip.compress(GOOD)[-4:],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(DAMAGED[name])
    with pytest.raises(DataError, match=f"{path} is damaged") as caught:
        read_idx(path, 3)
    assert "\n" not in str(caught.value)
