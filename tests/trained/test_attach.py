"""A new client: trained by the run's own rules, joined to its graph, and left as files that can be loaded."""

import dataclasses
import json
import shutil
import warnings

import pytest
import torch
from PIL import Image

from jgesr_lightning import load_client
from jgesr_lightning.aggregators import Upload, build_aggregator
from jgesr_lightning.cli import main
from jgesr_lightning.config import ConfigError
from jgesr_lightning.data import load_dataset
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.trained import open_trained
from jgesr_lightning.trained.attach import _joined, _share, attach
from jgesr_lightning.trained.samples import Samples
from jgesr_lightning.trained.source import network


def newcomer(samples=60):
    raw = load_dataset("synthetic")
    chosen = (raw.test_labels < 2).nonzero()[:samples, 0]
    return raw.test_inputs[chosen], raw.test_labels[chosen]


def test_a_new_client_trains_joins_and_is_reported(result, tmp_path, capsys):
    x, y = newcomer()
    torch.save({"x": x, "y": y}, tmp_path / "late.pt")
    out = tmp_path / "out"
    call = ["attach", str(result.folder), "--data", str(tmp_path / "late.pt"), "--rounds", "8", "--out", str(out)]
    assert main(call) == 0
    said = capsys.readouterr().err
    card = json.loads((out / "card.json").read_text())["attached"]
    for key in ("before", "trained", "joined"):
        assert f"{100 * card['accuracy'][key]:.2f} %" in said
    assert card["accuracy"]["trained"] > card["accuracy"]["before"]
    assert len(card["edges"]) == 4
    assert max(card["edges"]) > 0
    assert load_client(out, 0)(x).shape == (60, 10)


def test_the_others_stay_as_they_are(result):
    before = {path: path.read_bytes() for path in result.folder.rglob("*") if path.is_file()}
    attach(open_trained(result.folder), Samples(*newcomer()))
    assert before == {path: path.read_bytes() for path in result.folder.rglob("*") if path.is_file()}


def test_it_starts_from_the_mean_of_the_received_models(result):
    trained = open_trained(result.folder)
    mean = checkpoint.rows(checkpoint.find(result.folder / "checkpoint"))["models"].double().mean(0)
    learnt = attach(trained, Samples(*newcomer()), rounds=1)
    names = dict(trained.client(0).net.named_parameters())
    moved = torch.cat([learnt.state_dict[name].flatten() for name in names]).double() - mean
    assert 0 < float(moved.norm()) < 0.5 * float(mean.norm())


def test_it_trains_at_the_rates_of_the_first_rounds(result):
    trained = open_trained(result.folder)
    plain = attach(trained, Samples(*newcomer()), rounds=1)
    falling = trained.config.replace(
        local=trained.config.local.replace(schedule="cosine", schedule_rounds=2, schedule_factor=0.0)
    )  # nothing of the rate is left after two rounds, which the run has had
    learnt = attach(dataclasses.replace(trained, config=falling), Samples(*newcomer()), rounds=1)
    assert learnt.accuracies["trained"] == plain.accuracies["trained"] > learnt.accuracies["before"]


def test_a_method_without_a_graph_says_so(averaged, tmp_path, capsys):
    x, y = newcomer()
    torch.save({"x": x, "y": y}, tmp_path / "late.pt")
    call = ["attach", str(averaged.folder), "--data", str(tmp_path / "late.pt"), "--out", str(tmp_path / "out")]
    assert main(call) == 0
    assert "fedavg learns no graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting", [{"neighbours": 2}, {"groups": 0.6}, {"distances": "directions"}, {"layer_weights": "snr"}]
)
def test_a_graph_that_rests_on_what_is_not_kept_is_not_joined(result, setting):
    trained = open_trained(result.folder)
    method = trained.config.aggregator
    config = trained.config.replace(aggregator=method.replace(**setting))
    learnt = attach(dataclasses.replace(trained, config=config), Samples(*newcomer()))
    ((key, value),) = setting.items()
    assert learnt.edges is None and "joined" not in learnt.accuracies
    assert learnt.alone.startswith(f"not joined: under {key}={value} the graph rests on")


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.25),
        ({"fidelity": "scaled"}, 0.75),
        ({"fidelity": "uniform"}, 1.0),
        ({"fidelity_power": 0.5}, 0.5),
        ({"fidelity_power": 0.5, "fidelity": "scaled"}, 3 * 0.5 / (0.5 + 0.5**0.5 + 0.5)),
        ({"fidelity_power": 0.0, "fidelity": "scaled"}, 1.0),
    ],
)
def test_a_newcomer_weighs_as_the_clients_do(settings, share):
    sizes = [10, 20, 10]
    method = build_aggregator("jgesr", **settings)
    assert _share(method, sizes) == pytest.approx(share)
    upload = Upload(torch.zeros(3, 2), torch.tensor(sizes) / 40, None, None, None, torch.arange(3), 3)
    assert float(method.weights(upload)[0]) == pytest.approx(share)


@pytest.mark.parametrize(("smoothing", "pull"), [("full", 0.1), ("printed", 0.05)])
def test_a_newcomer_is_smoothed_as_the_clients_were(result, smoothing, pull):
    trained = open_trained(result.folder)
    received = checkpoint.rows(trained.found)["models"]
    layout, row = ParameterLayout.of(network(trained.card)), received.mean(0) + 0.01
    method = build_aggregator("jgesr", smoothing=smoothing)
    joined, edges = _joined(trained, method, layout, received, row, 50)
    z = 50 / (50 + sum(entry["samples"] for entry in trained.card["clients"]))
    expected = (z * row.double() + pull * edges @ received.double()) / (z + pull * edges.sum())
    torch.testing.assert_close(joined, expected.float())


def test_too_few_samples_and_exports_are_refused(result, tmp_path, capsys):
    x, y = newcomer(1)
    torch.save({"x": x, "y": y}, tmp_path / "one.pt")
    assert main(["attach", str(result.folder), "--data", str(tmp_path / "one.pt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["export", str(result.folder), "--out", str(tmp_path / "away")]) == 0
    assert main(["attach", str(tmp_path / "away"), "--data", str(tmp_path / "one.pt")]) == 2
    assert "needs the run's own folder" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["result", "averaged"])
def test_a_newcomer_whose_training_diverged_is_said_to_have(run, request, tmp_path, capsys):
    x, y = newcomer()
    torch.save({"x": 1e30 * x.float(), "y": y}, tmp_path / "late.pt")
    folder = request.getfixturevalue(run).folder
    capsys.readouterr()  # what the run said, where this test is the first to ask for it
    assert main(["attach", str(folder), "--data", str(tmp_path / "late.pt"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the newcomer's training diverged (NaN or infinity in the model); ")
    assert said.count("\n") == 1 and "units of" in said and "local.lr" in said and not (tmp_path / "out").exists()


def test_models_of_a_run_that_diverged_are_not_laid_to_the_newcomer(result, monkeypatch):
    received = checkpoint.rows(checkpoint.find(result.folder / "checkpoint"))["models"]
    monkeypatch.setattr("jgesr_lightning.trained.attach.checkpoint.rows", lambda _: {"models": received * torch.nan})
    with pytest.raises(ConfigError, match=r"^the run's own models diverged "):
        attach(open_trained(result.folder), Samples(*newcomer()))


def test_what_cannot_be_joined_is_a_line(result, monkeypatch):
    def free(*_):
        raise ValueError("an edge would cost nothing")

    monkeypatch.setattr("jgesr_lightning.trained.attach.edge_weights", free)
    with pytest.raises(ConfigError, match=r"^an edge would cost nothing$"):
        attach(open_trained(result.folder), Samples(*newcomer()))


def test_a_run_that_was_stopped_before_it_kept_a_graph_says_so(result, tmp_path):
    trained = open_trained(result.folder)
    shared = {**trained.found.shared, "graphs": {}}
    stopped = dataclasses.replace(trained, found=dataclasses.replace(trained.found, shared=shared))
    with pytest.raises(ConfigError, match="stopped after round 2 and has kept no graph yet to join; go on with resume"):
        attach(stopped, Samples(*newcomer()))


def test_launchers_variables_are_nothing_to_a_new_client(result, monkeypatch):
    for name in ("RANK", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(shutil, "which", lambda name, *_, **__: f"/usr/bin/{name}")  # srun, which Lightning looks for
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(attach(open_trained(result.folder), Samples(*newcomer())).accuracies) == {
            "before",
            "trained",
            "joined",
        }


def test_a_client_of_other_data_is_not_replaced(result, tmp_path, capsys):
    x, y = newcomer()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        torch.save({"x": x, "y": y}, tmp_path / folder / "late.pt")
    call = ["attach", str(result.folder), "--out", str(tmp_path / "out"), "--data"]
    for _ in range(2):  # the same one again
        assert main([*call, str(tmp_path / "a" / "late.pt")]) == 0
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main([*call, str(tmp_path / "b" / "late.pt")]) == 2
    assert f"{tmp_path}/out holds the client of {tmp_path}/a/late.pt; name another" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == content
    card = (tmp_path / "out" / "card.json").read_bytes()
    assert main(["export", str(result.folder), "--out", str(tmp_path / "out")]) == 2  # nor by the run's own models
    assert f"{tmp_path}/out holds the client of {tmp_path}/a/late.pt; name another" in capsys.readouterr().err
    assert (tmp_path / "out" / "card.json").read_bytes() == card
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["card.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["card.json", "model.safetensors"])
def test_a_file_of_another_program_is_not_replaced(result, tmp_path, capsys, name):
    x, y = newcomer()
    torch.save({"x": x, "y": y}, tmp_path / "late.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("[]")
    call = ["attach", str(result.folder), "--data", str(tmp_path / "late.pt"), "--out", str(tmp_path / "out")]
    assert main(call) == 2
    line = f"error: {tmp_path}/out/{name} is no file of this program's; name another folder with --out\n"
    assert capsys.readouterr().err == line
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["[]"]


def test_an_export_is_not_replaced_and_a_folder_is_named_from_within(result, tmp_path, monkeypatch, capsys):
    assert main(["export", str(result.folder), "--out", str(tmp_path / "away")]) == 0
    x, y = newcomer()
    torch.save({"x": x, "y": y}, tmp_path / "late.pt")
    call = ["attach", str(result.folder), "--data", str(tmp_path / "late.pt"), "--out", str(tmp_path / "away")]
    assert main(call) == 2
    assert "away holds the models of a run, an export; name another folder with --out" in capsys.readouterr().err
    tree = tmp_path / "late"
    for k, image in enumerate(x[:, 0].numpy()):
        (tree / f"pattern {int(y[k])}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tree / f"pattern {int(y[k])}" / f"{k}.png")
    monkeypatch.chdir(tree)
    run = shutil.copytree(result.folder, tmp_path / "run")
    assert main(["attach", str(run), "--data", "."]) == 0
    assert capsys.readouterr().err.rstrip().endswith("attached/late")
