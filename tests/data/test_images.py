import tarfile

import numpy as np
import pytest
import torch

from jgesr_lightning.data.dataset import DataError
from jgesr_lightning.data.images import read_archive, read_folder

from .conftest import CLASSES, image_of, unpack


def test_archive_decodes_to_the_very_images(tmp_path, cifar_archive):
    dataset = read_archive(cifar_archive(tmp_path / "cifar10.tgz"), verify=False)
    assert dataset.classes == CLASSES
    assert dataset.train_inputs.shape == (50, 3, 32, 32) and dataset.test_inputs.shape == (20, 3, 32, 32)
    assert dataset.train_labels.tolist() == sorted(list(range(10)) * 5)
    assert np.array_equal(dataset.train_inputs[5 * 3 + 2].numpy(), image_of("train", 3, 2))
    assert np.array_equal(dataset.test_inputs[2 * 9 + 1].numpy(), image_of("test", 9, 1))


def test_unpacked_folder_gives_the_same(tmp_path, cifar_archive):
    path = cifar_archive(tmp_path / "cifar10.tgz")
    with tarfile.open(path) as archive:
        unpack(archive, tmp_path)
    packed, unpacked = (
        read_archive(path, verify=False),
        read_folder(tmp_path / "cifar10", verify=False),
    )
    for field in ("train_inputs", "train_labels", "test_inputs", "test_labels"):
        assert torch.equal(getattr(packed, field), getattr(unpacked, field))


def test_files_of_the_packing_system_are_passed_over(tmp_path, cifar_archive):
    files = [("train", 0, "a.png", image_of("train", 0, 0)), ("train", 0, "._a.png", b"resource fork")]
    files += [("test", 0, "a.png", image_of("test", 0, 0)), ("test", 0, "readme.txt", b"hello")]
    files += [("train", 4, "a.png", image_of("train", 4, 0))]
    dataset = read_archive(cifar_archive(tmp_path / "cifar10.tgz", files), verify=False)
    assert (len(dataset.train_inputs), len(dataset.test_inputs)) == (2, 1)


def test_damage_is_named(tmp_path, cifar_archive):
    good = cifar_archive(tmp_path / "cifar10.tgz").read_bytes()
    path = tmp_path / "cut.tgz"
    for content in (good[: len(good) // 2], b"<html>", b"", good[:5000] + bytes(64) + good[5064:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{path} is damaged"):
            read_archive(path, verify=False)


@pytest.mark.parametrize("content", [b"", b"not a picture"])
def test_an_image_that_is_none_is_named(tmp_path, cifar_archive, content):
    files = [("test", 0, "a.png", image_of("test", 0, 0)), ("train", 0, "a.png", image_of("train", 0, 0))]
    path = cifar_archive(tmp_path / "x.tgz", [*files, ("train", 4, "bad.png", content)])
    with pytest.raises(DataError, match=f"{path}: train/deer/bad.png is damaged, or no PNG image"):
        read_archive(path, verify=False)


def test_inputs_of_several_sizes_are_refused(tmp_path, cifar_archive):
    files = [(split, 0, "a.png", image_of(split, 0, 0)) for split in ("train", "test")]
    path = cifar_archive(tmp_path / "x.tgz", [*files, ("train", 1, "b.png", np.zeros((3, 8, 8), np.uint8))])
    with pytest.raises(
        DataError, match=r"train/automobile/b.png is an image of 8 x 8 pixels, where 32 x 32 are needed"
    ):
        read_archive(path, verify=False)


def test_another_archive_is_refused(tmp_path, cifar_archive):
    path = cifar_archive(tmp_path / "x.tgz", [("train", 0, "a.png", image_of("train", 0, 0))])
    with pytest.raises(DataError, match="holds no images at test/"):
        read_archive(path, verify=False)
    with pytest.raises(DataError, match="holds no images at train/"):
        read_folder(tmp_path, verify=False)
