"""New data: images, tensors and tables, read as the clients' data were, and what does not fit."""

import csv
import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image

from jgesr_lightning import load_client, load_config, run
from jgesr_lightning.cli import main
from jgesr_lightning.config import ConfigError
from jgesr_lightning.data.dataset import printable
from jgesr_lightning.trained import open_trained
from jgesr_lightning.trained.samples import labelled, unlabelled


@pytest.fixture
def pictures(result, tmp_path):
    """Eight random images with random labels, as a folder of classes and as files of tensors."""
    card = open_trained(result.folder).card
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, (8, *card["network"]["input_shape"]), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, len(card["classes"]), (8,), generator=draw)
    for k in range(8):
        folder = tmp_path / "tree" / card["classes"][int(y[k])]
        folder.mkdir(parents=True, exist_ok=True)
        image = x[k, 0] if len(x[k]) == 1 else x[k].movedim(0, -1)
        Image.fromarray(image.numpy()).save(folder / f"{k}.png")
    torch.save({"x": x, "y": y}, tmp_path / "new.pt")
    np.savez(tmp_path / "new.npz", x=x.numpy(), y=y.numpy())
    return x, y


def rows(capsys):
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.parametrize("name", ["tree", "new.pt", "new.npz"])
def test_every_client_is_scored_on_new_data(result, pictures, tmp_path, capsys, name):
    x, y = pictures
    assert main(["evaluate", str(result.folder), "--data", str(tmp_path / name), "--what", "received"]) == 0
    found = [float(row["accuracy/received"]) for row in rows(capsys)]
    with torch.no_grad():
        expected = [
            float((load_client(result.folder, k, "received")(x).argmax(1) == y).double().mean()) for k in range(4)
        ]
    assert found == pytest.approx([*expected, sum(expected) / 4], abs=1e-6)


def test_without_data_each_client_is_scored_on_its_own_tests(result, capsys):
    assert main(["evaluate", str(result.folder)]) == 0
    mean = float(result.metrics["accuracy/trained"].iloc[-1])
    assert float(rows(capsys)[-1]["accuracy/trained"]) == pytest.approx(mean, abs=1e-6)


def test_samples_are_classified_from_any_file(result, pictures, tmp_path, capsys):
    x, _ = pictures
    model = load_client(result.folder, 1)
    with torch.no_grad():
        expected = [model.classes[k] for k in model(x).argmax(1)]
    assert main(["predict", str(result.folder), "--client", "1", str(tmp_path / "new.npz")]) == 0
    assert [row["class"] for row in rows(capsys)] == expected
    files = sorted((tmp_path / "tree").rglob("*.png"), key=lambda path: int(path.stem))
    assert main(["predict", str(result.folder), "--client", "1", *map(str, files)]) == 0
    found = rows(capsys)
    assert [row["class"] for row in found] == expected
    assert all(0 < float(row["probability"]) <= 1 for row in found)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: torch.save({"x": torch.zeros(2, 5), "y": torch.zeros(2)}, path), "the network takes"),
        (lambda path: torch.save({"y": torch.zeros(2)}, path), "must hold x and y"),
        (lambda path: path.write_bytes(b"no"), "cannot be read"),
        (lambda path: None, "there is no file"),
    ],
)
def test_what_does_not_fit_names_the_file(result, tmp_path, capsys, make, words):
    make(tmp_path / "a.pt")
    assert main(["evaluate", str(result.folder), "--data", str(tmp_path / "a.pt")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "a.pt" in said
    assert said.count("\n") == 1


def write_table(path, columns, rows):
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.mark.parametrize("exported", [False, True])
def test_columns_of_a_table_are_taken_by_their_names(tmp_path, monkeypatch, capsys, exported):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    rows = np.random.default_rng(0).normal(size=(40, 2)).round(3).tolist()
    for name in ("a", "b"):
        write_table(tmp_path / "data" / f"{name}.csv", ["u", "v", "ill"], [[u, v, int(u > 0)] for u, v in rows])
    settings = (
        f"data.name=clients data.root={tmp_path / 'data'} data.label=ill data.fraction=1 clients=2 model.name=mlp"
    )
    settings += (
        f" rounds=1 local.lr=0.5 aggregator.name=fedavg runtime.devices=1 logging.wandb=false output_dir={tmp_path}"
    )
    place = str(run(load_config("mnist_quick", settings)).folder)
    if exported:
        assert main(["export", place, "--out", str(tmp_path / "away")]) == 0
        place = str(tmp_path / "away")
    write_table(tmp_path / "same.csv", ["u", "v", "ill"], [[u, v, int(u > 0)] for u, v in rows])
    write_table(tmp_path / "turned.csv", ["v", "more", "ill", "u"], [[v, "x", int(u > 0), u] for u, v in rows])
    found = []
    for name in ("same", "turned"):
        capsys.readouterr()
        label = ["--label", "ill"] if exported else []  # else that of the run's data
        assert main(["evaluate", place, "--data", str(tmp_path / f"{name}.csv"), *label]) == 0
        assert main(["predict", place, "--client", "0", str(tmp_path / f"{name}.csv")]) == 0
        found.append(capsys.readouterr().out.replace(name, ""))
    assert found[0] == found[1]
    assert main(["predict", place, "--client", "0", str(tmp_path / "none.csv")]) == 2
    assert f"error: there is no file or folder {tmp_path / 'none.csv'}\n" in capsys.readouterr().err
    write_table(tmp_path / "twice.csv", ["u", "v", "u"], [[9, v, u] for u, v in rows])
    assert main(["predict", place, "--client", "0", str(tmp_path / "twice.csv")]) == 2
    assert "twice.csv has more than one column 'u'" in capsys.readouterr().err
    write_table(tmp_path / "other.csv", ["u", "w", "ill"], [[u, v, int(u > 0)] for u, v in rows])
    assert main(["evaluate", place, "--data", str(tmp_path / "other.csv"), "--label", "ill"]) == 2
    assert "other.csv has no column 'v'; the network was trained on u, v" in capsys.readouterr().err


def test_what_a_table_lacks_is_said_in_the_words_of_the_command(tmp_path):
    (tmp_path / "new.csv").write_text("u,v,ill\n1,2,0\n")
    with pytest.raises(ConfigError, match=r"name the column of labels by --label \(columns are separated by commas\)$"):
        labelled(tmp_path / "new.csv", (2,), ("0", "1"), "label")
    (tmp_path / "new.csv").write_text("u;v;ill\n1,5;2;0\n")
    line = r"its columns are separated by semicolons, and must be by commas"
    with pytest.raises(ConfigError, match=f"{line}; then name the column of labels by --label, as 'label' is none$"):
        labelled(tmp_path / "new.csv", (2,), ("0", "1"), "label")
    with pytest.raises(ConfigError, match=f"new.csv: {line}$"):
        unlabelled(tmp_path / "new.csv", (2,), ("u", "v"))


def test_a_client_is_told_by_its_number_or_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    rows = np.random.default_rng(0).normal(size=(40, 2)).round(3).tolist()
    called = ["01", "1", "2", "9", "bergen"]  # 0 to 4, in the order of their files
    for name in called:
        write_table(tmp_path / "data" / f"{name}.csv", ["u", "v", "label"], [[u, v, int(u > 0)] for u, v in rows])
    settings = f"data.name=clients data.root={tmp_path / 'data'} data.fraction=1 clients=5 model.name=mlp rounds=1"
    settings += f" aggregator.name=fedavg runtime.devices=1 logging.wandb=false output_dir={tmp_path}"
    place = run(load_config("mnist_quick", settings)).folder
    meant = {"01": 0, "1": 1, "2": 2, "9": 3, "bergen": 4, "0": 0, "3": 3, "02": 2}
    assert {client: load_client(place, client).client for client in meant} == meant
    with pytest.raises(ConfigError, match=r"^client is 9; .* has clients 0 to 4$"):
        load_client(place, 9)
    assert main(["export", str(place), "--out", str(tmp_path / "away")]) == 0
    write_table(tmp_path / "new.csv", ["u", "v"], rows)
    for folder in (place, tmp_path / "away"):
        capsys.readouterr()
        for client in ("4", "bergen"):
            assert main(["predict", str(folder), "--client", client, str(tmp_path / "new.csv")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:41] == lines[41:]
        for wrong, said in (("brgen", "'brgen' (did you mean 'bergen'?)"), ("7", "7"), ("x", "'x'")):
            assert main(["predict", str(folder), "--client", wrong, str(tmp_path / "new.csv")]) == 2
            assert capsys.readouterr().err == f"error: client is {said}; {folder} has clients 0 to 4\n"


def test_images_from_0_to_1_are_refused_by_a_network_of_bytes(result, pictures, tmp_path, capsys):
    x, y = pictures
    model = load_client(result.folder, 1)
    assert torch.equal(model(x.float()), model(x))  # the same numbers
    for scaled in (x / 255, x.double() / 255):
        with pytest.raises(ValueError, match="between 0 and 1; this network takes bytes, 0 to 255"):
            model(scaled)
    model(torch.zeros(1, *model.input_shape))  # black is black on any scale
    torch.save({"x": x / 255, "y": y}, tmp_path / "scaled.pt")
    for command in (["evaluate", "--data"], ["predict", "--client", "1"], ["attach", "--data"]):
        assert main([command[0], str(result.folder), *command[1:], str(tmp_path / "scaled.pt")]) == 2
        said = capsys.readouterr()
        assert "multiply them by 255" in said.err and not said.out


def test_images_are_found_and_read_as_in_training(result, pictures, tmp_path, capsys):
    tree = tmp_path / "tree"
    assert main(["evaluate", str(result.folder), "--data", str(tree)]) == 0
    flat = capsys.readouterr().out
    for folder in [path for path in tree.iterdir() if path.is_dir()]:
        for path in list(folder.iterdir()):
            (folder / "deep" / path.stem).mkdir(parents=True)
            path.rename(folder / "deep" / path.stem / "a.jpg")  # of another ending than its format
    (tree / "__MACOSX").mkdir()
    (tree / "__MACOSX" / "0.png").write_bytes(b"resource fork")
    assert main(["evaluate", str(result.folder), "--data", str(tree)]) == 0
    assert capsys.readouterr().out == flat


def test_bytes_are_refused_by_a_network_of_numbers_from_0_to_1(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    x, _ = pictures
    np.savez(tmp_path / "set.npz", x=x.numpy().repeat(8, 0) / 255, y=np.arange(64) % 2)
    settings = (
        f"data.name=tensors data.root={tmp_path / 'set.npz'} data.fraction=1 data.partition=iid data.min_samples=2 "
        f"clients=2 rounds=1 aggregator.name=fedavg runtime.devices=1 logging.wandb=false output_dir={tmp_path}"
    )
    place = str(run(load_config("mnist_quick", settings)).folder)
    image = next((tmp_path / "tree").rglob("*.png"))
    assert main(["predict", place, "--client", "0", str(tmp_path / "set.npz")]) == 0
    assert main(["predict", place, "--client", "0", str(image)]) == 2
    assert "samples are bytes, 0 to 255; this network was trained on numbers about 0.5" in capsys.readouterr().err


def test_data_that_are_not_there_are_said_to_be_missing(result, capsys):
    for command in (["evaluate", "--data"], ["predict", "--client", "0"], ["attach", "--data"]):
        assert main([command[0], str(result.folder), *command[1:], "nowhere"]) == 2
        assert capsys.readouterr().err == "error: there is no file or folder nowhere\n"
    assert main(["predict", str(result.folder), "--client", "0", "no.png"]) == 2
    assert capsys.readouterr().err == "error: there is no file or folder no.png\n"


def test_classes_that_the_run_does_not_know_are_refused(result, pictures, tmp_path, capsys):
    x, _ = pictures
    torch.save({"x": x, "y": torch.full((8,), 99)}, tmp_path / "far.pt")
    assert main(["evaluate", str(result.folder), "--data", str(tmp_path / "far.pt")]) == 2
    assert "label 99" in capsys.readouterr().err
    (tmp_path / "tree" / "zebra").mkdir()  # without images, as in training, it is none
    assert main(["evaluate", str(result.folder), "--data", str(tmp_path / "tree")]) == 0
    Image.new("L", (28, 28)).save(tmp_path / "tree" / "zebra" / "0.png")
    capsys.readouterr()
    assert main(["evaluate", str(result.folder), "--data", str(tmp_path / "tree")]) == 2
    assert "class 'zebra'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("classes", "y", "places"),
    [
        (("1", "2", "3"), [1, 2], [0, 1]),  # by name
        (("1", "2", "3"), [0, 1, 2], "class '0' is none of the run's: 1, 2, 3"),  # not by place as soon as one is 0
        (("dark", "light"), [0, 1], [0, 1]),
        (("dark", "light"), [1, 2], "label 2 is not one of the run's 0 to 1"),
    ],
)
def test_numbers_are_places_only_where_no_class_is_called_by_one(tmp_path, classes, y, places):
    x = np.zeros((len(y), 2), np.float32)
    np.savez(tmp_path / "new.npz", x=x, y=np.array(y))
    write_table(tmp_path / "new.csv", ["u", "v", "label"], [[0, 0, label] for label in y])

    def found(name):
        return labelled(tmp_path / name, (2,), classes, "label").labels

    if isinstance(places, str):
        with pytest.raises(ConfigError, match=places):
            found("new.npz")
    else:
        assert found("new.npz").tolist() == places
    if classes[0] == "1" and places == [0, 1]:
        assert found("new.csv").tolist() == places
    else:  # in a table a class has a name
        with pytest.raises(ConfigError, match=r"new\.csv: class '\d' is none"):
            found("new.csv")


def test_names_that_no_text_file_can_hold_are_known_by_what_the_run_keeps_of_them(result, tmp_path):
    names = ("a\u200cb", "x\u00a0y", "a\nb", "z")
    classes = tuple(map(printable, names))
    assert classes[:2] == ("a\\u200cb", "x\\xa0y")
    np.savez(tmp_path / "new.npz", x=np.zeros((4, 2), np.float32), y=np.array(names))
    write_table(tmp_path / "new.csv", ["u", "v", "label"], [[k, 0, name] for k, name in enumerate(names)])
    for file in ("new.npz", "new.csv"):
        assert labelled(tmp_path / file, (2,), classes, "label").labels.tolist() == [0, 1, 2, 3]
    for name in names:
        (tmp_path / "tree" / name).mkdir(parents=True)
        Image.new("L", (28, 28)).save(tmp_path / "tree" / name / "0.png")
    found = labelled(tmp_path / "tree", (1, 28, 28), classes, "label")
    assert {classes[k] for k in found.labels.tolist()} == set(classes)
    trained = open_trained(result.folder)
    for called in (names, classes):  # a newcomer's card has its name as it is
        entries = [{**entry, "name": name} for entry, name in zip(trained.card["clients"], called, strict=True)]
        there = dataclasses.replace(trained, card={**trained.card, "clients": entries})
        assert [there.number_of(name) for name in (*names, *classes)] == [*range(4), *range(4)]
