import os
import pickle
import tarfile

import pytest
import torch

from jgesr_lightning.data.cifar import read_batches
from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.data.images import read_archive
from jgesr_lightning.data.unpickle import load_arrays


def test_the_same_data_in_the_same_order_as_the_image_archive(tmp_path, cifar_archive, cifar_batches):
    pictures = read_archive(cifar_archive(tmp_path / "cifar10.tgz"), verify=False)
    folder = cifar_batches(tmp_path / "cifar-10-batches-py")
    packed = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    for path in (folder, packed):
        batches = read_batches(path, verify=False)
        assert batches.classes == pictures.classes
        for field in ("train_inputs", "train_labels", "test_inputs", "test_labels", "mean", "std"):
            assert torch.equal(getattr(batches, field), getattr(pictures, field)), field


def test_damage_is_named(tmp_path, cifar_batches):
    folder = cifar_batches(tmp_path / "cifar-10-batches-py")
    good = (folder / "data_batch_3").read_bytes()
    wrong = pickle.dumps({"data": b"", "labels": [1], "filenames": ["a"]}, protocol=2)
    for content in (good[:-50], b"", b"<html>", wrong, pickle.dumps({}, protocol=2)):
        (folder / "data_batch_3").write_bytes(content)
        with pytest.raises(DataError, match=f"{folder}/data_batch_3 is damaged"):
            read_batches(folder, verify=False)
    (folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match=f"{folder}/data_batch_3 is damaged or unreadable"):
        read_batches(folder, verify=False)
    packed = tmp_path / "cifar-10-python.tar.gz"
    packed.write_bytes(b"<html>")
    with pytest.raises(DataError, match=f"{packed} is damaged"):
        read_batches(packed, verify=False)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_pickles_cannot_run_anything(tmp_path, monkeypatch, cifar_batches):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_arrays(pickle.dumps(Trap()))
    folder = cifar_batches(tmp_path / "cifar-10-batches-py")
    (folder / "test_batch").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"test_batch is damaged .*mkdir"):
        read_batches(folder, verify=False)
    assert not (tmp_path / "trapped").exists()
