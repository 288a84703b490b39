"""Data of one's own: images, tensors and tables of any shape, as a tree, one file, or a file a client."""

import io
import os
import pickle
import re
import struct
import sys
import zipfile
import zlib
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image

from jgesr_lightning.data import DataError, FederatedDataModule, load_dataset, make_dataset
from jgesr_lightning.data.dataset import statistics

pytestmark = pytest.mark.usefixtures("own_cache")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (24, 3, 6, 9), dtype=np.uint8)


def save_image(path, pixels, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels).convert(mode).save(path)


@pytest.fixture
def tree(tmp_path):
    """24 images of 9 x 6 pixels in three classes, endings in both cases, one class a folder deeper."""
    root = tmp_path / "tree"
    for k, image in enumerate(PIXELS):
        name = ("ant", "bee", "cow")[k % 3]
        inner = "deep/er" if name == "cow" else "."
        save_image(root / name / inner / f"{k:02d}.{'PNG' if name == 'bee' else 'png'}", image)
    return root


def test_a_tree_of_images(tree, own_cache):
    for _ in range(2):  # decoded, then out of the cache
        dataset = load_dataset("folder", tree)
        assert dataset.classes == ("ant", "bee", "cow")
        assert dataset.train_labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
        assert np.array_equal(
            dataset.train_inputs.numpy(), PIXELS[[*range(0, 24, 3), *range(1, 24, 3), *range(2, 24, 3)]]
        )
        assert len(dataset.test_inputs) == 0 and dataset.left_out == ""
    assert {path.name for path in tree.iterdir()} == {"ant", "bee", "cow"}  # nothing is put among somebody's data


def test_train_and_test_trees(tree, tmp_path):
    root = tmp_path / "both"
    root.mkdir()
    tree.rename(root / "train")
    save_image(root / "test" / "cow" / "a.png", PIXELS[0])
    dataset = load_dataset("folder", root)
    assert len(dataset.train_inputs) == 24
    assert dataset.test_labels.tolist() == [2] and np.array_equal(dataset.test_inputs[0].numpy(), PIXELS[0])
    assert dataset.left_out.startswith("the 1 images of test/ are not used")
    save_image(root / "val" / "cow" / "a.png", PIXELS[0])
    assert load_dataset("folder", root).left_out.startswith("left out 1 file that is not part of the set: val; the 1")
    save_image(root / "test" / "dog" / "a.png", PIXELS[0])
    with pytest.raises(DataError, match=f"{root}: class dog has images in test/ and none in train/"):
        load_dataset("folder", root)


def test_what_is_no_image_is_left_out_and_said(tree):
    (tree / "readme.txt").write_text("hello")
    (tree / ".ipynb_checkpoints").mkdir()
    save_image(tree / ".ipynb_checkpoints" / "00-checkpoint.png", PIXELS[0])
    for folder in (tree / "@eaDir", tree / "ant" / "@eaDir" / "00.png"):  # a file server's thumbnails
        folder.mkdir(parents=True)
        save_image(folder / "SYNOPHOTO_THUMB_M.png", PIXELS[0])
    (tree / "ant" / ".hidden").mkdir()
    (tree / "ant" / "._00.png").write_bytes(b"resource fork")
    (tree / "empty").mkdir()
    (tree / "ant" / "loop").symlink_to(tree / "ant")
    dataset = load_dataset("folder", tree)
    assert dataset.classes == ("ant", "bee", "cow") and len(dataset.train_inputs) == 24
    assert dataset.left_out.startswith(
        "left out 7 files that are not part of the set: .ipynb_checkpoints, @eaDir, ant/._00.png"
    )


def test_a_new_image_is_seen(tree):
    load_dataset("folder", tree)
    save_image(tree / "ant" / "new.png", PIXELS[1])
    assert len(load_dataset("folder", tree).train_inputs) == 25
    save_image(tree / "ant" / "new.png", PIXELS[2])
    os.utime(tree / "ant" / "new.png", ns=(0, 5))
    assert np.array_equal(load_dataset("folder", tree).train_inputs[8].numpy(), PIXELS[2])


def test_grey_images_have_one_channel_and_a_mixture_three(tmp_path):
    grey = RNG.integers(0, 256, (4, 5, 7), dtype=np.uint8)
    for k in range(4):
        save_image(tmp_path / "grey" / "ab"[k % 2] / f"{k}.png", grey[k], "L")
        save_image(tmp_path / "mixed" / "ab"[k % 2] / f"{k}.png", grey[k], "L")
    assert np.array_equal(load_dataset("folder", tmp_path / "grey").train_inputs.numpy(), grey[[0, 2, 1, 3], None])
    colour = RNG.integers(0, 256, (3, 5, 7), dtype=np.uint8)
    save_image(tmp_path / "mixed" / "b" / "0.png", colour)
    mixed = load_dataset("folder", tmp_path / "mixed").train_inputs.numpy()
    assert np.array_equal(mixed[:2], grey[[0, 2], None].repeat(3, axis=1))
    assert np.array_equal(mixed[2], colour) and np.array_equal(mixed[3:], grey[[1, 3], None].repeat(3, axis=1))


@pytest.mark.parametrize("ending", ["jpg", "JPEG", "bmp", "tiff", "webp", "ppm"])
def test_other_formats(tmp_path, ending):
    for k, label in enumerate("abab"):
        save_image(tmp_path / label / f"{k}.{ending}", np.full((3, 8, 8), 60 * k, np.uint8))
    images = load_dataset("folder", tmp_path).train_inputs.float()
    assert [round(float(image.mean()) / 60) for image in images] == [0, 2, 1, 3]


def broken(path):
    path.write_bytes(path.read_bytes()[:100])


def text(path):
    path.write_text("no image")


def other_size(path):
    save_image(path, PIXELS[0, :, :, :5])


def deep(path):
    Image.fromarray(RNG.integers(0, 60_000, (6, 9)).astype(np.uint16)).save(path)


def deep_in_colour(path):
    """Write a .png of 16 bits a channel, which Pillow can read, as 8, and not write."""
    rows = b"".join(b"\0" + row.tobytes() for row in RNG.integers(0, 60_000, (6, 9, 3)).astype(">u2"))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", 9, 6, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken, "is damaged, or no"),
        (text, r"is damaged, or no JPEG or PNG image \(cannot identify image file\);"),
        (other_size, r"is an image of 5 x 6 pixels, where 9 x 6 are needed, as .*ant/00.png is"),
        (deep, "has more than 8 bits a channel"),
        (deep_in_colour, "has more than 8 bits a channel"),
    ],
)
def test_an_image_that_does_not_fit_is_named(tree, damage, message):
    damage(tree / "bee" / "04.PNG")
    with pytest.raises(DataError, match=f"{tree}/bee/04.PNG {message}") as caught:
        load_dataset("folder", tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["folder", "tensors", "clients"])
def test_the_place_must_be_given_and_exist(tmp_path, monkeypatch, name):
    monkeypatch.setenv("JGESR_DATA", str(tmp_path))  # the place of published sets
    with pytest.raises(DataError, match=f"data.name={name} needs data.root: the "):
        load_dataset(name)
    missing = tmp_path / "missing"
    with pytest.raises(DataError, match=f"data.root is '{missing}', which does not exist; data.name={name} needs the"):
        load_dataset(name, missing)
    with pytest.raises(DataError, match=f"{tmp_path}"):  # there is nothing in it
        load_dataset(name, tmp_path)
    assert not missing.exists() and not (tmp_path / ".cache").exists()


def test_names_that_no_text_file_can_hold_are_escaped(tmp_path):
    for name in (b"a\xff", b"b\nc", "ünï, x".encode()):
        save_image(tmp_path / os.fsdecode(name) / "0.png", PIXELS[0])
    dataset = load_dataset("folder", tmp_path)
    assert dataset.classes == ("a\\udcff", "b\\nc", "ünï, x")
    "".join(dataset.classes).encode()


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_opened(tree, tmp_path):
    os.mkfifo(tree / "ant" / "pipe.png")
    (tree / "ant" / "gone.png").symlink_to(tmp_path / "gone")
    dataset = load_dataset("folder", tree)
    assert len(dataset.train_inputs) == 24 and "ant/gone.png, ant/pipe.png" in dataset.left_out
    os.mkfifo(tmp_path / "set.npz")
    with pytest.raises(DataError, match=r"set.npz must be a .pt or .npz file"):
        load_dataset("tensors", tmp_path / "set.npz")


def test_a_folder_that_may_not_be_looked_into_is_named(tree, monkeypatch):
    real = os.scandir

    def scandir(path="."):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=f"{tree}/cow/deep cannot be looked into .Permission denied"):
        load_dataset("folder", tree)


def test_half_a_tree_and_a_single_class_are_refused(tree, tmp_path):
    (tmp_path / "half").mkdir()
    tree.rename(tmp_path / "half" / "train")
    with pytest.raises(DataError, match="holds train/ without its counterpart"):
        load_dataset("folder", tmp_path / "half")
    save_image(tmp_path / "one" / "ant" / "0.png", PIXELS[0])
    with pytest.raises(DataError, match=r"all samples are of one class \(ant\)"):
        load_dataset("folder", tmp_path / "one")


def test_parts_of_a_set_are_not_taken_for_classes(tree, tmp_path):
    (tmp_path / "parts").mkdir()
    tree.rename(tmp_path / "parts" / "Training")
    save_image(tmp_path / "parts" / "Testing" / "ant" / "0.png", PIXELS[0])
    with pytest.raises(DataError, match="holds Testing, Training, which look like parts of a set rather than classes"):
        load_dataset("folder", tmp_path / "parts")
    assert load_dataset("folder", tmp_path / "parts" / "Training").classes == ("ant", "bee", "cow")


def save(path, **entries):
    if path.suffix == ".npz":
        np.savez(path, **entries)
    else:
        torch.save({k: torch.from_numpy(v) if v.dtype.kind != "U" else v.tolist() for k, v in entries.items()}, path)
    return path


Y = np.arange(24) % 3


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (PIXELS, (3, 6, 9)),
        (PIXELS[:, 0], (1, 6, 9)),
        (PIXELS.astype(np.float64) / 7, (3, 6, 9)),
        (RNG.normal(size=(24, 5)).astype(np.float16), (5,)),
        (RNG.integers(-9, 9, (24, 5)), (5,)),
        (RNG.integers(0, 9, (24, 5), dtype=np.uint8), (5,)),
    ],
    ids=lambda value: f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "",
)
def test_one_file_of_tensors(tmp_path, suffix, x, shape):
    path = save(tmp_path / f"set{suffix}", x=x, y=Y)
    for root in (path, tmp_path):
        dataset = load_dataset("tensors", root)
        assert tuple(dataset.train_inputs.shape) == (24, *shape)
        assert dataset.train_inputs.dtype == (torch.uint8 if x.dtype == np.uint8 and x.ndim > 2 else torch.float32)
        np.testing.assert_allclose(dataset.train_inputs.numpy().reshape(x.shape), x, rtol=1e-6)
        assert dataset.train_labels.tolist() == Y.tolist() and dataset.classes == ("0", "1", "2")


def test_labels_of_any_values_become_classes(tmp_path):
    x = RNG.normal(size=(6, 2))
    dataset = load_dataset("tensors", save(tmp_path / "a.npz", x=x, y=np.array([10, 7, 10, 2, 7, 2])[:, None]))
    assert dataset.classes == ("2", "7", "10") and dataset.train_labels.tolist() == [2, 1, 2, 0, 1, 0]
    dataset = load_dataset("tensors", save(tmp_path / "b.npz", x=x, y=np.array(list("zazbba"))))
    assert dataset.classes == ("a", "b", "z") and dataset.train_labels.tolist() == [2, 0, 2, 1, 1, 0]
    named = {"classes": np.array(["no", "yes", "never"])}
    dataset = load_dataset("tensors", save(tmp_path / "c.pt", x=x, y=np.array([1, 0, 1, 0, 1.0, 0]), **named))
    assert dataset.classes == ("no", "yes", "never") and dataset.train_labels.tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("ids", [np.arange(24) % 4, np.array(list("dcba") * 6)])
def test_clients_of_one_file(tmp_path, ids):
    path = save(tmp_path / "set.npz", x=PIXELS, y=Y, clients=ids, extra=Y)
    dataset = load_dataset("tensors", path)
    assert dataset.left_out == "left out the entries extra"
    data = FederatedDataModule("tensors", path, num_clients=4, min_samples=2, partition="natural")
    data.setup()
    order = sorted(set(ids.tolist()))
    assert data.client_names == tuple(map(str, order))
    for k in range(4):
        indices = np.sort(np.concatenate([data.train_indices(k), data.test_indices(k)]))
        assert indices.tolist() == np.flatnonzero(ids == order[k]).tolist()


X = RNG.normal(size=(24, 5))
NAN = X.copy()
NAN[7, 2] = np.nan


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"x": X}, r"holds x; it must hold x and y \(and lacks y\)"),
        ({"X": X, "Y": Y}, "lacks x, y"),
        ({"x": X, "y": Y[:-1]}, r"y has shape \(23,\); it must be one entry for each of 24 samples"),
        ({"x": X, "y": Y - 1}, "y of sample 0 is -1; it must be a whole number of at least 0"),
        ({"x": X, "y": Y + 0.5}, "y is float64; it must be whole numbers"),
        ({"x": X, "y": np.full(24, np.nan)}, "y is float64; it must be whole numbers"),
        ({"x": X, "y": np.zeros(24, int)}, r"all samples are of one class \(0\)"),
        ({"x": X, "y": np.array(["a"] * 23 + [" "])}, "y of sample 23 is empty"),
        ({"x": NAN, "y": Y}, "x of sample 7 holds NaN or infinity"),
        ({"x": X * 1e300, "y": Y}, r"x of sample 0 holds NaN or infinity"),
        ({"x": X[:, 0], "y": Y}, r"x has shape \(24,\); it must be images"),
        ({"x": X[:, :0], "y": Y}, r"x has shape \(24, 0\)"),
        ({"x": X[:0], "y": Y[:0]}, r"x has shape \(0, 5\)"),
        ({"x": X[:, :, None, None, None], "y": Y}, r"x has shape \(24, 5, 1, 1, 1\)"),
        ({"x": PIXELS.transpose(0, 2, 3, 1), "y": Y}, r"looks like \(n, H, W, C\); channels come first"),
        ({"x": X * 1j, "y": Y}, "x is complex128, not plain real numbers"),
        ({"x": np.array(["a"] * 24), "y": Y}, "x is <U1; it must be numbers"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "label 2 is not one of 0 to 1, the names in `classes`"),
        (
            {"x": X, "y": np.array(list("ab") * 12), "classes": np.array(["a", "b"])},
            "label 'a' is a text; with the entry `classes` labels are whole numbers",
        ),
        ({"x": X, "y": Y, "clients": Y[:5]}, r"clients has shape \(5,\)"),
        ({"x": X, "y": Y, "clients": Y - 5}, "clients of sample 0 is -5"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, entries, message):
    path = save(tmp_path / "set.npz", **entries)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("tensors", path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"x": torch.eye(4).to_sparse(), "y": torch.arange(4)}, "x is float32, not plain real numbers"),
        ({"x": torch.eye(4), "y": torch.arange(4).to_sparse()}, "y is int64; it must be whole numbers"),
        ({"x": torch.eye(4), "y": [[1], [2, 3], [], []]}, "y is list; it must be whole numbers"),
        ({"x": torch.eye(4), "y": {"a": 1}}, r"y has shape \(\)"),
        ({"x": {"a": 1}, "y": torch.arange(4)}, "x is dict; it must be numbers"),
        ({"x": torch.eye(4), "y": torch.arange(4), "classes": 5}, "classes is '5'; it must be a list of texts"),
        ({"x": torch.eye(4), "y": torch.arange(4), "classes": "abcd"}, "classes is 'abcd'; it must be a list of texts"),
        ({"x": torch.eye(4), "y": torch.arange(4), "classes": ["a", "b", "a", "c"]}, "classes names one class twice"),
    ],
)
def test_odd_entries_are_named(tmp_path, entries, message):
    torch.save(entries, tmp_path / "set.pt")
    with pytest.raises(DataError, match=rf"set.pt: (tensors: )?{message}") as caught:
        load_dataset("tensors", tmp_path)
    assert "\n" not in str(caught.value)


def test_numbers_of_other_kinds_are_taken(tmp_path):
    torch.save({"x": torch.eye(4).bfloat16(), "y": torch.arange(4).bfloat16()}, tmp_path / "set.pt")
    dataset = load_dataset("tensors", tmp_path)
    assert torch.equal(dataset.train_inputs, torch.eye(4)) and dataset.train_labels.tolist() == [0, 1, 2, 3]
    (tmp_path / "set.pt").unlink()
    np.savez(tmp_path / "set.npz", x=np.eye(4).astype(">f4"), y=np.arange(4).astype(">u2"))
    dataset = load_dataset("tensors", tmp_path)
    assert torch.equal(dataset.train_inputs, torch.eye(4)) and dataset.train_labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bool", "int8"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 1, 2, 2)])
def test_every_kind_of_number_can_be_a_sample(tmp_path, kind, shape):
    torch.save({"x": torch.eye(4).reshape(shape).to(getattr(torch, kind)), "y": torch.arange(4)}, tmp_path / "set.pt")
    assert torch.equal(load_dataset("tensors", tmp_path).train_inputs, torch.eye(4).reshape(shape))


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def bomb(path):
    """A file of a few kilobytes that says it holds a hundred gigabytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**11,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(1_000_000))


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
@pytest.mark.parametrize("content", ["text", "nothing", "pickle", "trap", "list", "cut", "bomb", "folder"])
def test_files_that_are_something_else_are_named_and_nothing_is_run(tmp_path, monkeypatch, suffix, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"set{suffix}"
    if content == "folder":
        path.mkdir()
    elif content == "trap":
        if suffix == ".pt":
            torch.save({"x": Trap(), "y": torch.zeros(3)}, path)
        else:
            np.savez(path, x=np.array([Trap()], dtype=object), y=Y)
    elif content == "list":
        torch.save([1, 2], path)
    elif content == "cut":
        save(path, x=X, y=Y)
        path.write_bytes(path.read_bytes()[:-100])
    elif content == "bomb":
        bomb(path)
    else:
        path.write_bytes({"text": b"hello", "nothing": b"", "pickle": pickle.dumps(Trap())}[content])
    with pytest.raises(DataError, match=str(path)) as caught:
        load_dataset("tensors", path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "trapped").exists()


def write_csv(path, rows, header="a,label,b"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")


@pytest.fixture
def tables(tmp_path):
    """Three clients, 8 samples each of 2 features and 2 classes."""
    root = tmp_path / "clients"
    for c, name in enumerate(("bob", "alice", "zoe")):
        write_csv(root / f"{name}.csv", [f"{c}.5,{'yes' if i % 2 else 'no'},{i}e-1" for i in range(8)])
    return root


def test_a_table_a_client(tables):
    dataset = load_dataset("clients", tables)
    assert dataset.clients == ("alice", "bob", "zoe") and dataset.classes == ("no", "yes")
    assert dataset.train_clients.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert dataset.train_labels.tolist() == [0, 1] * 12
    assert dataset.train_inputs[:, 0].tolist() == [1.5] * 8 + [0.5] * 8 + [2.5] * 8
    torch.testing.assert_close(dataset.train_inputs[:8, 1], torch.arange(8) / 10)
    data = FederatedDataModule("clients", tables, num_clients=3, min_samples=2)
    data.setup()
    assert data.partition_name == "natural" and data.client_names == ("alice", "bob", "zoe")
    assert data.sizes.tolist() == [6, 6, 6] and data.test_sizes.tolist() == [2, 2, 2]
    assert data.input_shape == (2,)


def test_files_of_clients_may_be_of_any_kind(tmp_path, tables):
    root = tmp_path / "mixed"
    x = RNG.normal(size=(9, 4)).astype(np.float32)
    root.mkdir()
    save(root / "a.npz", x=x, y=np.arange(9) % 2)
    save(root / "b.PT".lower(), x=x + 1, y=np.arange(9) % 3)
    (root / "notes.md").write_text("x")
    dataset = load_dataset("clients", root)
    assert dataset.clients == ("a", "b") and dataset.classes == ("0", "1", "2")
    assert torch.equal(dataset.train_inputs[9:], torch.from_numpy(x + 1))
    assert dataset.left_out.endswith("notes.md")


def test_tests_that_are_given_are_used(tables, tmp_path):
    root = tmp_path / "both"
    root.mkdir()
    tables.rename(root / "train")
    for c, name in enumerate(("alice", "bob", "zoe")):
        write_csv(root / "test" / f"{name}.csv", [f"{10 * c},yes,0", f"{10 * c + 1},no,1"][: 1 + c % 2])
    data = FederatedDataModule("clients", root, num_clients=3, min_samples=2)
    data.setup()
    assert data.sizes.tolist() == [8, 8, 8] and data.test_sizes.tolist() == [1, 2, 1]
    assert data.class_counts.tolist() == [[4, 5], [5, 5], [4, 5]]
    raw = load_dataset("clients", root)
    other = FederatedDataModule("clients", root, num_clients=3, min_samples=2, partition="iid")
    other.setup()
    assert other.left_out == "the 4 test samples of the clients' own are not used" and data.left_out == ""
    x, y = data.test_tensors(1)
    torch.testing.assert_close(x, raw.normalise(torch.tensor([[10.0, 0.0], [11.0, 1.0]])))
    assert y.tolist() == [1, 0]
    (root / "test" / "zoe.csv").unlink()
    with pytest.raises(DataError, match="client zoe has a file in train/ and none in test/"):
        load_dataset("clients", root)


def test_tests_are_their_client_s_whatever_files_are_called(tmp_path):
    for part, ending in (("train", "npz"), ("test", "pt")):  # "a.npz" comes before "a.o.npz", "a.pt" after it
        (tmp_path / "both" / part).mkdir(parents=True)
        save(tmp_path / "both" / part / f"a.{ending}", x=np.zeros((4, 2)), y=np.arange(4) % 2)
        save(tmp_path / "both" / part / "a.o.npz", x=np.ones((6, 2)), y=np.arange(6) % 2)
    (tmp_path / "both" / "notes.md").write_text("x")
    dataset = load_dataset("clients", tmp_path / "both")
    assert dataset.clients == ("a", "a.o") and dataset.left_out.endswith(": notes.md")
    assert dataset.test_inputs[:, 0].tolist() == dataset.test_clients.tolist() == [0] * 4 + [1] * 6


def test_a_client_without_tests_of_its_own_is_named(tables, tmp_path, monkeypatch):
    root = tmp_path / "both"
    root.mkdir()
    tables.rename(root / "train")
    for name in ("alice", "bob", "zoe"):
        write_csv(root / "test" / f"{name}.csv", ["1,yes,0"])
    whole = load_dataset("clients", root)
    without = replace(whole, test_clients=torch.tensor([0, 1, 1]))
    monkeypatch.setattr("jgesr_lightning.data.module.load_dataset", lambda *_, **__: without)
    with pytest.raises(DataError, match=r"client 2 \(zoe\) has no test samples"):
        FederatedDataModule("clients", root, num_clients=3, min_samples=2).setup()


def test_other_partitions_pool_the_clients(tables):
    data = FederatedDataModule("clients", tables, num_clients=5, min_samples=2, partition="iid")
    data.setup()
    assert data.client_names == () and int((data.sizes + data.test_sizes).sum()) == 24
    with pytest.raises(ValueError, match="clients is 5, but the data are those of 3 clients; set clients=3"):
        FederatedDataModule("clients", tables, num_clients=5, min_samples=2).setup()
    with pytest.raises(ValueError, match=r"client 0 \(alice\) has 8 samples and data.min_samples is 9"):
        FederatedDataModule("clients", tables, num_clients=3, min_samples=9).setup()


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (["1,no,2", "1,yes"], "a,label,b", "line 3: 2 values, but there are 3 columns"),
        (["1,no,x"], "a,label,b", "line 2: column 'b' is 'x'; it must be a finite number"),
        (["1,no,"], "a,label,b", "line 2: column 'b' is ''"),
        (["nan,no,1"], "a,label,b", "line 2: column 'a' is 'nan'"),
        (["1_000,no,1"], "a,label,b", "line 2: column 'a' is '1_000'; it must be a finite number"),
        (["\uff11\uff12,no,1"], "a,label,b", "line 2: column 'a' is '\uff11\uff12'; it must be a finite number"),
        (["1e39,no,1"], "a,label,b", "line 2: column 'a' is '1e39'"),
        (["1,,2"], "a,label,b", "line 2: column 'label' is empty"),
        ([], "a,label,b", "holds no samples below its line of names"),
        (
            ["1,no,2"],
            "a,Label,b",
            r"has no column 'label' \(did you mean 'Label'\?\); its first line names a, Label, b",
        ),
        (["1,no,2"], "a,c,b", r"a, c, b; name the column of labels by data.label \(columns are separated by commas\)$"),
        (["1;no;2"], "a;label;b", "bob.csv: its columns are separated by semicolons, and must be by commas$"),
        (
            ["1,5;no;2"],
            'a;"c";b',
            "its columns are separated by semicolons, and must be by commas; then name the column of labels by "
            "data.label, as 'label' is none$",
        ),
        (['1,5;"no";2'], '"a";"label";"b"', "bob.csv: its columns are separated by semicolons, and must be by commas$"),
        (["1,5;no"], '"a, in m";"c"', "separated by semicolons, and must be by commas; then name the column of labels"),
        (["1,no,2"], "a,label,a", "has more than one column 'a'"),
        (["no"], "label", "has the column 'label' alone"),
        (["1,no,2,3"], "a,label,b,c", "has features a, b, c, but .*alice.csv has a, b; they must agree"),
        (['1,"no,2'], "a,label,b", "cannot be read as a table"),
        (["1,1.5,2"], "a,label,b", "labels such as '1.5' are numbers, but no whole ones"),
        *(
            (
                ["1,no,2", f"1,{cell},2"],
                "a,label,b",
                f"line 3: column 'label' is '{re.escape(cell)}'; each sample needs",
            )
            for cell in ("NA", "N/A", "NaN", "nan", "null", "?")
        ),
        (["1,1,2", "1,inf,2"], "a,label,b", "labels such as 'inf' are numbers, but no whole ones"),
        (["0,1,no,2"], ",a,label,b", r"has a column without a name; name it, or leave it out \(pandas: index=False"),
        (["1,-1,2"], "a,label,b", "there is a label -1"),
    ],
)
def test_tables_that_do_not_fit_are_named(tables, rows, header, message):
    path = tables / "bob.csv"
    write_csv(path, rows, header)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("clients", tables)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_tables_in_other_encodings(tables):
    (tables / "bob.csv").write_bytes("a,label,b\r\n1,no,2\r\n\r\n3,yes,4\r\n".encode("utf-8-sig"))
    assert len(load_dataset("clients", tables).train_inputs) == 18
    (tables / "bob.csv").write_bytes("a,label,b\n1,no,2\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"bob.csv cannot be read as a table"):
        load_dataset("clients", tables)


def test_blanks_after_commas_are_none_of_a_value(tables):
    write_csv(tables / "bob.csv", ['1, "no", 2', '3,"yes",4', '5,  "yes",6'], 'a, "label", "b"')
    write_csv(tables / "zoe.csv", ['1, "no, never", 2'], "a, label , b")
    dataset = load_dataset("clients", tables)
    assert dataset.classes == ("no", "no, never", "yes") and dataset.features == ("a", "b")


def test_names_of_columns_may_hold_semicolons_and_lines(tables):
    for path in tables.iterdir():
        write_csv(path, ["1,no,2", "3,yes,4"], '"a;\nb",label,"c;d"')
    assert load_dataset("clients", tables).features == ("a;\nb", "c;d")


def test_the_column_of_labels_is_chosen(tables):
    for path in tables.iterdir():
        path.write_text(path.read_text().replace("label", "target"))
    with pytest.raises(DataError, match=r"alice.csv has no column 'label'"):
        load_dataset("clients", tables)
    assert load_dataset("clients", tables, label="target").classes == ("no", "yes")


def test_whole_numbers_and_texts_as_labels(tables):
    for path in tables.iterdir():
        path.write_text(path.read_text().replace("yes", "10").replace("no", "9.0"))
    assert load_dataset("clients", tables).classes == ("9", "10")
    write_csv(tables / "bob.csv", ["1,cat,2"])
    assert load_dataset("clients", tables).classes == ("10", "9", "cat")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("01 02", "01 A1", "02 A1"), ("01", "02", "A1")),  # what one file says of a code counts in all
        (("1.0 2", "1 2.0", "x 1.0"), ("1", "2", "x")),
        (("1.0 2", "1 2.0", "01 2"), ("01", "1", "2")),
        (("0 00", "00 000", "0 000"), ("0", "00", "000")),
        (("1_0 10", "10 1_0", "10"), ("10", "1_0")),
        (("\uff11\uff12 10", "10 \uff11\uff12", "10"), ("10", "\uff11\uff12")),
        (("07 08", "08 07", "07"), ("7", "8")),
        (("v1.0 v1", "v1", "v1.0"), ("v1", "v1.0")),
    ],
)
def test_codes_in_tables_are_one_class_each(tables, labels, classes):
    for path, texts in zip(sorted(tables.iterdir()), labels, strict=True):
        write_csv(path, [f"1,{text},2" for text in texts.split()] * 2)
    assert load_dataset("clients", tables).classes == classes


def test_features_that_single_precision_makes_constant_are_named(tables, tmp_path):
    write_csv(tables / "bob.csv", [f"{1_700_000_000 + i},no,2" for i in range(4)])
    with pytest.raises(DataError, match=r"bob.csv: column 'a' lies between 1700000000.0 and 1700000003.0,"):
        load_dataset("clients", tables)
    write_csv(tables / "bob.csv", [f"{1_700_000_000 + 1000 * i},no,2" for i in range(4)])
    assert len(load_dataset("clients", tables).train_inputs[:, 0].unique()) > 4
    large = np.arange(120, dtype=np.uint64).reshape(24, 5)
    for x in (1e6 + 1e-3 * X, 10**12 + large.astype(int), 2**63 + large, 2**31 + large.astype(np.uint32), X * 1e-60):
        save(tmp_path / "set.npz", x=x, y=Y)
        with pytest.raises(DataError, match=r"set.npz: feature 0 of x lies between .*; subtract what"):
            load_dataset("tensors", tmp_path / "set.npz")


def test_files_that_do_not_go_together_are_named(tables, tmp_path):
    save(tables / "bob.npz", x=X, y=Y)
    with pytest.raises(DataError, match=r"bob.npz and bob.csv would both be client bob"):
        load_dataset("clients", tables)
    (tables / "bob.csv").unlink()
    with pytest.raises(DataError, match=r"bob.npz has features without names, but .*alice.csv has a, b"):
        load_dataset("clients", tables)
    other = tmp_path / "other"
    other.mkdir()
    save(other / "a.npz", x=X, y=Y)
    save(other / "b.npz", x=PIXELS, y=Y)
    with pytest.raises(DataError, match=r"b.npz has x of uint8 \(3, 6, 9\) a sample, but .*a.npz has float32 \(5,\)"):
        load_dataset("clients", other)


def test_a_class_for_testing_alone_is_refused(tables, tmp_path):
    root = tmp_path / "both"
    root.mkdir()
    tables.rename(root / "train")
    for name in ("alice", "bob", "zoe"):
        write_csv(root / "test" / f"{name}.csv", ["1,maybe,2"])
    with pytest.raises(DataError, match=r"test/alice.csv has samples of class maybe, which no client has for training"):
        load_dataset("clients", root)


def test_normalised_by_what_is_trained_on_alone(tmp_path):
    x = RNG.normal(3, 2, size=(60, 4)).astype(np.float32)
    path = save(tmp_path / "set.npz", x=x, y=np.arange(60) % 3)
    data = FederatedDataModule("tensors", path, num_clients=3, min_samples=2, partition="iid")
    data.setup()
    rows = np.concatenate([data.train_indices(k) for k in range(3)])
    assert len(rows) < 60
    assert data.normalisation["scale"] == 1
    assert data.normalisation["measured_on"] == "the clients' training samples"
    np.testing.assert_allclose(data.normalisation["mean"], x[rows].astype(np.float64).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(data.normalisation["std"], x[rows].astype(np.float64).std(axis=0), rtol=1e-6)
    trained = torch.cat([data.train_tensors(k)[0] for k in range(3)])
    torch.testing.assert_close(trained.mean(dim=0), torch.zeros(4), rtol=0, atol=1e-5)
    tested, _ = data.test_tensors(0)
    mean, std = (torch.tensor(data.normalisation[key]).float() for key in ("mean", "std"))
    torch.testing.assert_close(tested, (torch.from_numpy(x[data.test_indices(0)]) - mean) / std)


def test_tests_that_are_not_used_change_no_normalisation(tree, tables, tmp_path):
    for name, root, test in (("folder", tree, "cow/a.png"), ("clients", tables, "bob.csv")):
        found = []
        for part in ("alone", "beside"):
            data = FederatedDataModule(name, root, num_clients=2, min_samples=2, partition="iid")
            data.setup()
            found.append(data.normalisation)
            if part == "alone":
                both = tmp_path / f"{name}-both"
                both.mkdir()
                root = root.rename(both / "train").parent
                for path in (both / "train").glob("*.csv" if name == "clients" else test.replace("a.png", "**/*.png")):
                    copy = both / "test" / path.relative_to(both / "train")
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(path.read_bytes())
        assert found[0] == found[1] and found[0]["measured_on"] == "the clients' training samples"


def test_published_sets_are_normalised_by_their_training_part():
    data = FederatedDataModule("synthetic", num_clients=4, kappa=1.0)
    data.setup()
    raw = load_dataset("synthetic")
    assert data.normalisation == {
        "scale": 255,
        "mean": raw.mean.tolist(),
        "std": raw.std.tolist(),
        "measured_on": "the training part of the set",
    }
    assert data.facts()["input_shape"] == [1, 28, 28] and data.facts()["partition"] == "dirichlet"


@pytest.mark.parametrize("shape", [(5000, 3), (4500, 2, 3, 4)])
def test_statistics_of_floats_equal_numpys(shape):
    x = RNG.normal(5, 3, size=shape).astype(np.float32)
    mean, std = statistics(torch.from_numpy(x))
    axes = (0, *range(2, x.ndim))
    np.testing.assert_allclose(mean.numpy(), x.astype(np.float64).mean(axis=axes), rtol=1e-12)
    np.testing.assert_allclose(std.numpy(), x.astype(np.float64).std(axis=axes), rtol=1e-12)
    chosen = torch.arange(0, len(x), 7)
    np.testing.assert_allclose(statistics(torch.from_numpy(x), chosen)[0].numpy(), x[::7].mean(axis=axes), rtol=1e-5)


@pytest.mark.parametrize("value", [0.1, 3.7, 98.6])
def test_a_feature_of_one_value_has_deviation_1(value):
    x = torch.full((38_009, 2), value)
    x[5, 1] = torch.nextafter(x[5, 1], torch.tensor(torch.inf))  # differs as little as a float can
    _, std = statistics(x)
    assert std[0] == 1 and 0 < std[1] < 1e-5


MINE = """
import torch
from jgesr_lightning.data import DataError, Source, make_dataset

def blobs(root, label):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    x = torch.randn(120, 8, generator=g) + 2 * torch.nn.functional.one_hot(y, 8)
    return make_dataset(f"blobs of {label}", (x, y), None, ("a", "b", "c"))

def kept(root):
    return Source(lambda: blobs(root, "nobody"), (root / "mine.py",))

def missing(root):
    raise DataError(f"there are no blobs in {root}")

def failing(root):
    return [1][1]

def failing_later(root):
    return Source(failing_inside)

def failing_inside():
    raise KeyError("two\\nlines")

def nobody(labels, num_clients):
    raise RuntimeError

def fractions(root):
    return make_dataset("fractions", (torch.zeros(100, 2), torch.arange(100) / 100), None, ("a", "b"))

def round_robin(labels, num_clients):
    return [range(k, len(labels), num_clients) for k in range(num_clients)]
"""


def test_functions_from_a_file_are_data_sets_and_partitions(tmp_path, monkeypatch):
    from jgesr_lightning.build import data_module
    from jgesr_lightning.config import ConfigError, load_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(
        "clients: 4\ndata: {name: './mine.py:blobs', partition: './mine.py:round_robin'}"
    )
    data = data_module(load_config("run.yaml"))
    assert data.input_shape == (8,) and data.classes == ("a", "b", "c")
    both = np.concatenate([data.train_indices(1), data.test_indices(1)])
    assert sorted(both) == list(range(1, 120, 4)) and data.class_counts.tolist() == [[10, 10, 10]] * 4
    kept = data_module(load_config("run.yaml", ["data.name=./mine.py:kept", f"data.root={tmp_path}", "seed=1"]))
    assert torch.equal(kept.train_tensors(0)[0].isfinite().all(), torch.tensor(True))
    assert [path.name[:5] for path in (tmp_path / ".cache").glob("*.pt")] == ["kept-"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name not in ("cache-home", "__pycache__")) == [
        ".cache",
        "mine.py",
        "run.yaml",
    ]
    for settings, message in (
        (["data.name=./mine.py:missing"], "there are no blobs in"),
        (["data.name=./mine.py:nope"], "data.name is .*holds no nope"),
        (
            ["data.name=./mine.py:failing"],
            r"^failing failed: IndexError: list index out of range .*mine.py, line 18\)$",
        ),
        (["data.name=./mine.py:failing_later"], r"^failing_inside failed: KeyError: .* \(.*mine.py, line 24\)$"),
        (["data.partition=./mine.py:nobody"], r"^nobody failed: RuntimeError \(.*mine.py, line 27\)$"),
        (["data.name=./mine.py:fractions"], "fractions: labels are numbers with a fraction; they must be whole"),
        (
            ["data.partition=./mine.py:blobs"],
            r"^data.partition=blobs; blobs\(.* cannot be called for this: missing a required argument: 'label'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            data_module(load_config("run.yaml", settings))


def test_a_function_that_changed_is_asked_again(tmp_path, monkeypatch, caplog):
    file = tmp_path / "mine.py"
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.py").write_text("the data")
    for samples, decoded in ((120, True), (120, False), (90, True)):
        file.write_text(MINE.replace("120", str(samples)))
        os.utime(file, ns=(0, 1))
        for module in [name for name in sys.modules if name.startswith("_mine_")]:
            monkeypatch.delitem(sys.modules, module)  # another process
        caplog.clear()
        assert len(load_dataset(f"{file}:kept", tmp_path / "kept").train_inputs) == samples
        assert ("Decoding" in caplog.text) == decoded


def test_a_run_goes_on_with_the_data_that_it_began_with_alone(tmp_path):
    from jgesr_lightning import experiment
    from jgesr_lightning.config import ConfigError, load_config

    many, labels = np.concatenate([X] * 6), np.concatenate([Y] * 6)
    save(tmp_path / "set.npz", x=many, y=labels)
    (tmp_path / "moved").mkdir()
    save(tmp_path / "moved" / "set.npz", x=many, y=labels)
    settings = ["data.name=tensors", "data.min_samples=2", "data.kappa=100", "clients=3", "model.name=mlp"]
    settings += ["aggregator.name=fedavg", "runtime.devices=1", "logging.wandb=false", "runtime.accelerator=cpu"]
    settings += [f"output_dir={tmp_path}", "name=run", "resume=auto", "local.epochs=1", "engine=sequential"]

    def run(rounds, place):
        return experiment.run(load_config(None, [*settings, f"data.root={tmp_path / place}", f"rounds={rounds}"]))

    assert run(1, "set.npz").status == "finished"
    assert run(2, "moved").rounds_done == 2
    many[1].flat[0] += 1  # a single number
    save(tmp_path / "moved" / "set.npz", x=many, y=labels)
    with pytest.raises(ConfigError, match="was written with other data"):
        run(3, "moved")
    assert run(3, "set.npz").rounds_done == 3
    from jgesr_lightning.trained import open_trained
    from jgesr_lightning.trained.scoring import own_accuracies

    assert len(own_accuracies(open_trained(tmp_path / "run"), "received")) == 3
    save(tmp_path / "set.npz", x=many, y=labels)
    with pytest.raises(ConfigError, match=r"the data of .*run are others by now"):
        own_accuracies(open_trained(tmp_path / "run"), "received")


def test_a_set_of_arrays_is_that_of_their_tensors():
    x, y, who = RNG.random((30, 4), dtype=np.float32), np.arange(30) % 3, np.arange(20) % 2

    def made(of):
        train, test = (of(x[:20]), of(y[:20])), (of(x[20:]), of(y[20:]))
        return make_dataset("mine", train, test, "abc", train_clients=of(who), clients="ab")

    arrays, tensors = made(np.asarray), made(torch.from_numpy)
    for name in (field.name for field in fields(arrays)):
        one, other = getattr(arrays, name), getattr(tensors, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    with pytest.raises(DataError, match="float64"):
        make_dataset("mine", (x.astype(float), y), None, "abc")
