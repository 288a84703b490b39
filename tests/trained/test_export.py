"""Models taken away: exact, complete, usable with the card alone, and refused in one line where there are none."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jgesr_lightning import load_client, load_config, run
from jgesr_lightning.cli import main
from jgesr_lightning.config import ConfigError
from jgesr_lightning.models import build_model, shape_arguments
from jgesr_lightning.trained import open_trained
from jgesr_lightning.trained.scoring import own_accuracies
from tests.trained.conftest import SETTINGS


def last_accuracies(result, kind):
    with open(result.folder / "clients.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == "2"]
    return [float(row[f"accuracy/{kind}"]) for row in rows]


@pytest.mark.parametrize("kind", ["received", "trained"])
@pytest.mark.parametrize("one_file", [False, True])
def test_accuracies_recomputed_from_the_files_are_those_of_the_run(result, tmp_path, kind, one_file):
    options = ["--one-file"] if one_file else []
    assert main(["export", str(result.folder), "--what", "both", "--out", str(tmp_path), *options]) == 0
    exported, ours = open_trained(tmp_path), open_trained(result.folder)
    for k in range(4):
        a, b = exported.client(k, kind).net.state_dict(), ours.client(k, kind).net.state_dict()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert own_accuracies(ours, kind) == last_accuracies(result, kind)


def test_a_file_and_its_card_are_enough(result, tmp_path):
    assert main(["export", str(result.folder), "--out", str(tmp_path)]) == 0
    card = json.loads((tmp_path / "card.json").read_text())
    about, entry = card["network"], card["clients"][2]
    net = build_model(about["name"], *shape_arguments(about["input_shape"]), about["num_classes"], about["seed"])
    net.load_state_dict(load_file(tmp_path / entry["files"]["trained"]["file"]))
    x = torch.randint(0, 256, (3, *about["input_shape"]), dtype=torch.uint8)
    numbers = card["normalisation"]
    mean, std = (torch.tensor(numbers[name]).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = net.eval()((x / numbers["scale"] - mean) / std)
        torch.testing.assert_close(load_client(tmp_path, 2)(x), expected, rtol=1e-4, atol=1e-5)
    assert entry["accuracy"]["trained"] == last_accuracies(result, "trained")[2]
    assert len(card["classes"]) == about["num_classes"]


def test_what_was_not_kept_is_refused(averaged, tmp_path, capsys):
    assert main(["export", str(averaged.folder), "--what", "both", "--out", str(tmp_path / "out")]) == 2
    assert "checkpoint.keep_trained=true" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert open_trained(averaged.folder).client(0).kind == "received"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere"], "there is no folder nowhere"),
        (["export", "{empty}"], "holds no checkpoint"),
        (["export", "{copy}"], "was copied without its checkpoint; name the folder of the run, runs/first/cell"),
        (["export", "{run}", "--what", "trianed"], "--what is 'trianed'"),
        (["predict", "{run}", "--client", "4", "x.png"], "clients 0 to 3"),
        (["predict", "{run}", "--client", "-1", "x.png"], "client is -1"),
        (["predict", "{run}", "--client", "0", "x.png"], "there is no file or folder x.png"),
        (["predict", "{run}", "--client", "0", "x.mp3"], "there is no file or folder x.mp3"),
        (["predict", "{run}", "--client", "0", "{run}/config.yaml"], "config.yaml is none of"),
        (["evaluate", "{run}", "--what", "sent"], "what is 'sent'"),
    ],
)
def test_what_is_wrong_is_one_line(result, tmp_path, capsys, arguments, words):
    copy = tmp_path / "copy"
    copy.mkdir()
    summary = {"status": "finished", "config": {"seed": 0}, "last": {"round": 1}, "copied_from": "runs/first/cell"}
    (copy / "summary.json").write_text(json.dumps(summary))
    given = [text.format(empty=tmp_path, run=result.folder, copy=copy) for text in arguments]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 7, "clients": []}', "[" * 100000])
def test_a_damaged_card_is_named(tmp_path, content):
    (tmp_path / "card.json").write_text(content)
    with pytest.raises(ConfigError, match=r"card\.json"):
        open_trained(tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("network", "name", 7),
        ("network", "input_shape", "ab"),
        ("network", "input_shape", [1, 28, "28"]),
        ("network", "num_classes", 3),
        ("network", "dtype", "int8"),
        ("normalisation", "mean", [0.0, 0.0]),
        ("normalisation", "mean", None),
        ("normalisation", "std", [0]),
        ("normalisation", "scale", "x"),
        ("classes", None, "abc"),
        ("classes", None, None),
        ("clients", None, []),
        ("clients", None, [{"files": {}}]),
        ("clients", None, [{"files": {"trained": {}}}]),
        ("clients", None, [7]),
    ],
)
def test_a_card_with_wrong_content_is_named(result, tmp_path, section, key, value):
    assert main(["export", str(result.folder), "--out", str(tmp_path)]) == 0
    card = json.loads((tmp_path / "card.json").read_text())
    if key is None:
        card[section] = value
    else:
        card[section][key] = value
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=r"card\.json"):
        open_trained(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sizes", [1]),
        ("normalisation", None),
        ("normalisation", {"scale": "x", "mean": None, "std": [0]}),
        ("classes", 3),
    ],
)
def test_a_summary_with_wrong_content_is_named(result, tmp_path, key, value):
    shutil.copytree(result.folder, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    summary["data"][key] = value
    path.write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match=r"run/summary\.json is damaged"):
        open_trained(tmp_path / "run")


def test_the_folder_of_a_damaged_summary_is_named(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(result.folder, "s")  # a name that occurs in any message
    (tmp_path / "s" / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"^s: summary\.json holds no summary"):
        open_trained("s")


def test_an_export_in_the_run_s_own_folder_does_not_hide_the_run(result, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(result.folder, run)
    assert main(["export", str(run), "--out", str(run)]) == 0
    assert main(["evaluate", str(run)]) == 0
    assert open_trained(run).config is not None


def test_an_older_checkpoint_that_is_used_is_said(result, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(result.folder, run)
    (run / "checkpoint" / "round_00002" / "state.pt").write_bytes(b"")
    assert open_trained(run).card["run"]["round"] == 1
    assert "round_00001 is used" in caplog.text


def test_out_may_not_be_a_file(result, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["export", str(result.folder), "--out", str(tmp_path / "file")]) == 2
    assert "file is a file; name a folder" in capsys.readouterr().err


def test_clients_may_be_numpys_numbers(result):
    assert load_client(result.folder, np.int64(1)).client == 1
    for wrong in (True, 1.0, None, "one", "-1", ""):
        with pytest.raises(ConfigError, match="client is"):
            load_client(result.folder, wrong)


def test_a_damaged_file_is_named(result, tmp_path):
    assert main(["export", str(result.folder), "--out", str(tmp_path)]) == 0
    path = tmp_path / "trained_client_001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="trained_client_001"):
        load_client(tmp_path, 1, "trained")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["card.json", "trained_client_002.safetensors"])
def test_what_is_not_of_an_export_stays_and_is_named(result, tmp_path, capsys, name):
    (tmp_path / name).write_text('{"title": "of another program"}')
    before = contents(tmp_path)
    assert main(["export", str(result.folder), "--out", str(tmp_path)]) == 2
    line = f"error: {tmp_path}/{name} is no file of this program's; name another folder with --out\n"
    assert capsys.readouterr().err == line
    assert contents(tmp_path) == before


def test_an_export_that_was_cut_short_is_made_again(result, tmp_path):
    assert main(["export", str(result.folder), "--out", str(tmp_path)]) == 0
    before = contents(tmp_path)
    (tmp_path / "card.json").unlink()
    (tmp_path / "received_client_003.safetensors").unlink()
    assert main(["export", str(result.folder), "--out", str(tmp_path)]) == 0
    assert contents(tmp_path) == before


def test_what_only_a_former_export_held_goes_and_nothing_else(result, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(result.folder), "--out", str(out)]) == 0
    for kept in (out / "notes.txt", out / "other.safetensors", tmp_path / "beside.safetensors"):
        kept.write_text("mine")
    card = json.loads((out / "card.json").read_text())
    named = ("../beside.safetensors", "notes.txt", "was_here.safetensors")  # by hand; it is followed to no other place
    card["clients"].append({"files": {name: {"file": name} for name in named}})
    (out / "card.json").write_text(json.dumps(card))
    assert main(["export", str(result.folder), "--out", str(out), "--one-file", "--what", "trained"]) == 0
    found = sorted(path.name for path in out.iterdir())
    assert found == ["card.json", "notes.txt", "other.safetensors", "trained.safetensors"]
    assert (tmp_path / "beside.safetensors").exists()
    assert load_client(out, 3).kind == "trained"


def test_a_network_of_ones_own_goes_along(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(c, size, classes): return nn.Sequential(nn.Flatten(), nn.Linear(c * size * size, classes))\n"
    )
    done = run(load_config("mnist_quick", f"{SETTINGS} model.name={tmp_path}/mine.py:net output_dir={tmp_path}"))
    (tmp_path / "out").mkdir()
    assert main(["export", str(done.folder), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine.py").write_text("print('of another project')\n")
    capsys.readouterr()
    assert main(["export", str(done.folder), "--out", str(tmp_path / "theirs")]) == 2
    assert f"{tmp_path}/theirs/mine.py is another file than {tmp_path}/mine.py" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "theirs").iterdir()] == ["print('of another project')\n"]
    (tmp_path / "out" / "mine.py").write_text("an older network's\n")  # an export replaces what a former one wrote
    assert main(["export", str(done.folder), "--out", str(tmp_path / "out")]) == 0
    x = torch.randint(0, 256, (3, *open_trained(done.folder).card["network"]["input_shape"]), dtype=torch.uint8)
    expected = load_client(done.folder, 1)(x)
    (tmp_path / "mine.py").unlink()
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    monkeypatch.chdir("/")
    text = (tmp_path / "elsewhere" / "card.json").read_text()
    assert json.loads(text)["network"]["name"] == "./mine.py:net" and str(tmp_path) not in text
    assert torch.equal(load_client(tmp_path / "elsewhere", 1)(x), expected)
