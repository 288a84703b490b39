"""Files that are damaged, hostile, somebody else's or not part of the set: named, bounded in memory, left alone."""

import gzip
import os
import pickle
import resource
import struct
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from jgesr_lightning.data import DataError, cache, load_dataset, published, sources
from jgesr_lightning.data.archive import read_file, read_tgz
from jgesr_lightning.data.cache import cached, in_turn
from jgesr_lightning.data.cifar import read_batches
from jgesr_lightning.data.idx import read_idx, to_idx
from jgesr_lightning.data.images import read_archive, read_folder
from jgesr_lightning.data.published import check_file, image_digest

from .conftest import CLASSES, image_of, unpack
from .test_cache import dataset_of, equal, must_not_decode

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def bounded():
    """Let the test take no more than 300 MB above what it began with."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


@pytest.fixture
def shared(monkeypatch):
    """Return a folder that everybody may enter; pytest's own are their owner's alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(folder, "home"))
        yield Path(folder)


def as_nobody(task):
    """Return what `task` returns in a child process that has given up its rights (an ordinary user has few)."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.write(told, str(task()).encode())
        finally:
            os._exit(0)
    os.close(told)
    with os.fdopen(ready) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o000, 0o644), (0o555, 0o000)], ids=["folder", "file"])
def test_a_cache_of_another_user_that_may_not_be_read_is_passed_over(shared, folder_mode, file_mode, caplog):
    cached("toy", shared, "key", dataset_of)
    (shared / ".cache" / "toy.pt").chmod(file_mode)
    (shared / ".cache").chmod(folder_mode)

    def read_twice():
        found = cached("toy", shared, "key", dataset_of)
        again = cached("toy", shared, "key", must_not_decode)
        return (
            equal(found, dataset_of()),
            equal(again, dataset_of()),
            "trying the next place" in caplog.text,
            ("damaged" in caplog.text),
        )

    assert as_nobody(read_twice) == "(True, True, True, False)"
    (shared / ".cache").chmod(0o755)
    (shared / ".cache" / "toy.pt").chmod(0o644)
    assert equal(cached("toy", shared, "key", must_not_decode), dataset_of())


def test_a_data_folder_that_may_not_be_read_is_named(shared):
    private = shared / "private"
    (private / "MNIST" / "raw").mkdir(parents=True)
    private.chmod(0o000)

    def load():
        try:
            return load_dataset("mnist", private)
        except DataError as error:
            return error

    assert as_nobody(load).startswith(f"mnist: {private} may not be read (permission denied)")
    private.chmod(0o755)


def test_a_cache_that_cannot_be_replaced_is_kept_at_the_next_place(tmp_path, own_cache, monkeypatch):
    real = cache.write_cache

    def write(path, key, dataset):
        if path.is_relative_to(tmp_path / ".cache"):
            raise PermissionError(1, "Operation not permitted")  # a sticky folder, and the file is another user's
        real(path, key, dataset)

    monkeypatch.setattr(cache, "write_cache", write)
    cached("toy", tmp_path, "key", dataset_of)
    assert equal(cached("toy", tmp_path, "key", must_not_decode), dataset_of())


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with in_turn(tmp_path / "lock") as held:
        assert not held
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "new")
    with in_turn(tmp_path / "lock") as held:
        assert not held
    assert (tmp_path / "precious").read_text() == "kept" and not (tmp_path / "new").exists()


def forge(path, **changes):
    """Change fields of a cache file and give it the checksum of what it then holds."""
    content = torch.load(path, weights_only=True) | changes
    fields = {field: content[field] for field in (*cache.TENSORS, *cache.OPTIONAL) if field in content}
    torch.save(content | {"checksum": cache._checksum(fields)}, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"train_labels": torch.arange(40) % 10 + 200},
        {"test_labels": torch.full((8,), -1)},
        {"train_labels": (torch.arange(40) % 4).int()},
        {"mean": torch.tensor([float("nan")], dtype=torch.float64)},
        {"std": torch.zeros(1, dtype=torch.float64)},
        {"train_inputs": torch.zeros(40, 3, 8, 8, dtype=torch.uint8)},
        {"train_clients": torch.full((40,), 5)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_cache_with_a_matching_checksum_but_wrong_content_is_refused(tmp_path, changes, caplog):
    cached("toy", tmp_path, "key", dataset_of)
    forge(tmp_path / ".cache" / "toy.pt", **changes)
    assert equal(cached("toy", tmp_path, "key", dataset_of), dataset_of())
    assert "is damaged" in caplog.text


def test_a_cache_of_a_few_bytes_that_stand_for_many_is_refused(tmp_path, bounded):
    cached("toy", tmp_path, "key", dataset_of)
    path = tmp_path / ".cache" / "toy.pt"
    torch.save(torch.load(path, weights_only=True) | {"train_inputs": torch.zeros(1).expand(1 << 40)}, path)
    assert equal(cached("toy", tmp_path, "key", dataset_of), dataset_of())


def test_the_published_files_of_mnist_are_told_from_others(tmp_path, mnist_like):
    raw = mnist_like(tmp_path)
    with pytest.raises(
        DataError, match=rf"{raw}/train-images-idx3-ubyte is damaged or not the published .*data.verify=f"
    ):
        load_dataset("mnist", tmp_path)
    assert not (tmp_path / ".cache" / "mnist.pt").exists()
    assert len(load_dataset("mnist", tmp_path, verify=False).train_labels) == 20
    with pytest.raises(DataError, match="not the published"):  # what was kept unverified is not taken for verified
        load_dataset("mnist", tmp_path)


@pytest.mark.data
def test_one_flipped_bit_of_mnist_is_named(tmp_path, data_root):
    for file in (data_root("mnist") / "MNIST" / "raw").iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = tmp_path / "set" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in published.MNIST:
        (raw / name).symlink_to(tmp_path / name)
    content = bytearray((raw / "t10k-images-idx3-ubyte").read_bytes())
    content[5000] ^= 1
    (raw / "t10k-images-idx3-ubyte").unlink()
    (raw / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"{raw}/t10k-images-idx3-ubyte is damaged or not the published file"):
        load_dataset("mnist", tmp_path / "set")


def test_a_batch_that_is_not_the_published_one_is_never_unpickled(tmp_path, cifar_batches, monkeypatch):
    def must_not_run(content):
        raise AssertionError("unpickled before its checksum was compared")

    monkeypatch.setattr("jgesr_lightning.data.cifar.load_arrays", must_not_run)
    folder = cifar_batches(tmp_path / "cifar-10-batches-py")
    with pytest.raises(DataError, match=f"{folder}/data_batch_1 is damaged or not the published file"):
        load_dataset("cifar10", tmp_path)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    with pytest.raises(
        DataError, match=r"cifar-10-batches-py/data_batch_1 in .*tar.gz is damaged or not the published"
    ):
        read_batches(tmp_path / "cifar-10-python.tar.gz")


def test_the_checksums_are_those_that_torchvision_publishes():
    from torchvision.datasets import CIFAR10

    assert dict(CIFAR10.train_list + CIFAR10.test_list) == published.CIFAR10_BATCHES


def test_what_is_checked_is_the_content(tmp_path):
    check_file("x", b"abc", "900150983cd24fb0d6963f7d28e17f72")  # RFC 1321
    with pytest.raises(DataError, match="x is damaged or not the published file"):
        check_file("x", b"abd", "900150983cd24fb0d6963f7d28e17f72")


def test_images_are_the_same_in_any_order_and_another_class_is_not(tmp_path, cifar_archive, monkeypatch):
    dataset = read_archive(cifar_archive(tmp_path / "cifar10.tgz"), verify=False)
    images, labels = dataset.train_inputs, dataset.train_labels
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    digest = image_digest(images, labels)
    assert image_digest(images[order], labels[order]) == digest
    assert image_digest(images[order], labels) != digest
    changed = images.clone()
    changed[7, 1, 3, 3] ^= 1
    assert image_digest(changed, labels) != digest
    with pytest.raises(DataError, match="holds 50 train images, 50000 were published"):
        read_archive(tmp_path / "cifar10.tgz")
    test_digest = image_digest(dataset.test_inputs, dataset.test_labels)
    monkeypatch.setattr(published, "CIFAR10_IMAGES", {"train": (50, digest), "test": (20, test_digest)})
    read_archive(tmp_path / "cifar10.tgz")
    files = [("train", 0, f"{i}.png", image_of("train", 1, i)) for i in range(50)]
    files += [("test", 0, f"{i}.png", image_of("test", 1, i)) for i in range(20)]
    with pytest.raises(DataError, match="its train images or their classes are not the published ones"):
        read_archive(cifar_archive(tmp_path / "other.tgz", files))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_given_folder_that_is_not_there_is_an_error(tmp_path, monkeypatch, name):
    def no_download(*args):
        raise AssertionError("downloaded to a folder that did not exist")

    monkeypatch.setattr(sources, "download", no_download)
    (tmp_path / "file").touch()
    for root, words in ((tmp_path / "misspelt", "does not exist"), (tmp_path / "file", "is no folder")):
        with pytest.raises(DataError, match=f"data.root is '{root}', which {words}"):
            load_dataset(name, root)
        monkeypatch.setenv("JGESR_DATA", str(root))
        with pytest.raises(DataError, match=f"JGESR_DATA is '{root}', which {words}"):
            load_dataset(name)
    assert not (tmp_path / "misspelt").exists()


def test_dot_folders_and_other_files_are_left_out_and_said(tmp_path, cifar_archive):
    with tarfile.open(cifar_archive(tmp_path / "cifar10.tgz")) as archive:
        unpack(archive, tmp_path)
    train = tmp_path / "cifar10" / "train"
    plain = read_folder(tmp_path / "cifar10", verify=False)
    assert plain.left_out == ""
    (train / "cat" / "notes.txt").write_text("x")
    hidden = train / ".ipynb_checkpoints"
    hidden.mkdir()
    picture = next((train / "cat").glob("*.png"))
    (hidden / "a-checkpoint.png").write_bytes(picture.read_bytes())
    (train / "cat" / ".ipynb_checkpoints").mkdir()
    picture.rename(picture.with_suffix(".PNG"))
    dataset = read_folder(tmp_path / "cifar10", verify=False)
    assert dataset.classes == CLASSES
    assert len(dataset.train_inputs) == 50
    assert dataset.left_out == (
        "left out 3 files that are not part of the set: train/.ipynb_checkpoints/a-checkpoint.png, "
        "train/cat/.ipynb_checkpoints, train/cat/notes.txt"
    )
    assert load_dataset("cifar10", tmp_path, verify=False).left_out == ""  # the packed one comes first
    (tmp_path / "cifar10.tgz").unlink()
    for _ in range(2):  # decoded, then out of the cache
        assert load_dataset("cifar10", tmp_path, verify=False).left_out == dataset.left_out


@pytest.mark.parametrize("shape", [(0, 28, 28), (5, 0, 28)])
def test_an_idx_file_of_nothing_is_named(tmp_path, shape):
    path = tmp_path / "images"
    path.write_bytes(to_idx(np.zeros(shape, np.uint8)))
    with pytest.raises(DataError, match=f"{path} is damaged: its header says {shape[0]} x {shape[1]} x 28, which is n"):
        read_idx(path, 3)


def test_a_file_that_expands_beyond_its_set_is_named_in_bounded_memory(tmp_path, bounded):
    bomb = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as stream:
        for _ in range(60):
            stream.write(bytes(1 << 20))
    with pytest.raises(DataError, match=rf"{bomb} holds more than 47,040,016 bytes"):
        read_idx(bomb, 3, "0" * 32)
    with pytest.raises(DataError, match=rf"{bomb} holds more than 1,000 bytes"):
        read_file(bomb, 1000)
    with pytest.raises(DataError, match=rf"{bomb} holds more than 50,000,000 bytes"):
        read_tgz(bomb, 50_000_000, 10)


def tar_of(*headers):
    return gzip.compress(b"".join(headers) + bytes(1024))


def header(name, size, kind=tarfile.REGTYPE):
    entry = tarfile.TarInfo(name)
    entry.type = kind
    block = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 4 + size.to_bytes(8, "big", signed=True) if size < 0 else b"%011o\0" % size
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block[:512])


HOSTILE = {
    "negative": tar_of(header("a", 0), header("b", -512)),
    "negative link": tar_of(header("a", 0), header("b", -1024, b"7")),
    "negative long name": tar_of(header("a", 0), header("b", -512, tarfile.GNUTYPE_LONGNAME)),
    "negative extended": tar_of(header("a", 0), header("b", -1024, tarfile.XHDTYPE)),
    "too large": tar_of(header("a", 0), header("b", 1 << 30)),
    "nested names": tar_of(*[header("b", 0, tarfile.GNUTYPE_LONGNAME)] * 3000),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_end_in_one_line(tmp_path, name, bounded):
    path = tmp_path / "x.tgz"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=f"^{path} is damaged") as caught:
        read_tgz(path, 1 << 22, 100)
    assert "\n" not in str(caught.value)


def test_an_archive_of_too_many_files_is_refused(tmp_path):
    path = tmp_path / "x.tgz"
    path.write_bytes(tar_of(*[header(f"f{i}", 0) for i in range(30)]))
    assert len(read_tgz(path, 1 << 20, 30)) == 30
    with pytest.raises(DataError, match=f"{path} holds more than 29 files"):
        read_tgz(path, 1 << 20, 29)


def test_members_that_point_elsewhere_are_no_files(tmp_path):
    path = tmp_path / "x.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("dev", tarfile.CHRTYPE)):
            entry = tarfile.TarInfo(f"cifar10/train/cat/{name}.png")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
    assert read_tgz(path, 1 << 20, 10) == {}


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def claimed(width, height):
    """Return a PNG file that says it has that many pixels."""
    rows = zlib.compress(bytes(1000))
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("side", "message"),
    [(60_000, "bomb"), (10_000, "bomb"), (9_000, "an image of 9000 x 9000 pixels, where 32 x 32 are needed")],
)
def test_a_picture_that_claims_to_be_huge_is_named_and_not_decoded(tmp_path, cifar_archive, bounded, side, message):
    files = [(split, 0, "a.png", image_of(split, 0, 0)) for split in ("train", "test")]
    path = cifar_archive(tmp_path / "x.tgz", [*files, ("train", 1, "b.png", claimed(side, side))])
    with pytest.raises(DataError, match=rf"{path}: train/automobile/b.png .*{message}"):
        read_archive(path, verify=False)


@pytest.mark.parametrize(
    "batch",
    [
        {"data": [[1]], "labels": [1], "filenames": ["a"]},
        {"data": np.zeros((1, 3072), np.uint8), "labels": [10], "filenames": ["a"]},
        {"data": np.zeros((1, 3072), np.uint8), "labels": [[1]], "filenames": ["a"]},
        {"data": np.zeros((1, 3072), np.uint8), "labels": [True], "filenames": ["a"]},
        {"data": np.zeros((1, 3072), np.uint8), "labels": [1], "filenames": ["a" * 256]},
        {"data": np.zeros((1, 3072), np.uint8), "labels": [1], "filenames": [None]},
        {"data": np.zeros((0, 3072), np.uint8), "labels": [], "filenames": []},
        {"data": np.zeros((1, 3072), np.float32), "labels": [1], "filenames": ["a"]},
        [1, 2],
        "text",
        None,
    ],
)
def test_pickles_of_other_kinds_are_named(tmp_path, cifar_batches, batch):
    folder = cifar_batches(tmp_path / "cifar-10-batches-py")
    (folder / "data_batch_2").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=f"^{folder}/data_batch_2 is damaged") as caught:
        read_batches(folder, verify=False)
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_fit_name_the_folder(tmp_path, mnist_like):
    raw = mnist_like(tmp_path)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(to_idx(np.arange(10, 20, dtype=np.uint8)))
    with pytest.raises(DataError, match=rf"{raw}: mnist: test labels reach from 10 to 19, but there are 10 classes"):
        load_dataset("mnist", tmp_path, verify=False)
