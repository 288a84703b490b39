"""The sweep files: W&B's schema takes them, and the command that an agent builds from them is a run of ours."""

from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps import utils as sweeps

from jgesr_lightning.aggregators import aggregator_names
from jgesr_lightning.cli import configuration

SWEEPS = sorted((Path(__file__).parent.parent / "configs" / "sweeps").glob("*.yaml"))


def command_of(sweep, chosen):
    """Return what W&B's agent runs, built by W&B's own functions as its agent does."""
    macros = sweeps.create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    macros["env"] = ["/usr/bin/env"]
    words = []
    for word in sweeps.create_sweep_command(list(sweep["command"])):
        words += macros[word[2:-1]] if word.startswith("${") else [word]
    return words


def choices(sweep):
    """Return one value of each parameter, the last where they are listed, else the smallest."""
    return {key: spec["values"][-1] if "values" in spec else spec["min"] for key, spec in sweep["parameters"].items()}


@pytest.fixture(params=SWEEPS, ids=lambda path: path.stem)
def sweep(request):
    return yaml.safe_load(request.param.read_text())


def test_there_are_sweeps():
    assert {path.stem for path in SWEEPS} >= {"jgesr_bayes", "methods_grid"}


def test_wandbs_own_schema_takes_it(sweep):
    cfg = pytest.importorskip("sweeps.config.cfg", reason="W&B's sweeps engine is not installed (pip install sweeps)")
    assert cfg.schema_violations_from_proposed_config(sweep) == []


def test_what_the_agent_runs_is_a_run_of_ours(sweep, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    chosen = choices(sweep)
    words = command_of(sweep, chosen)
    assert words[:5] == ["/usr/bin/env", "python", "-m", "jgesr_lightning", "train"]
    config = configuration(words[5:])
    values = {"aggregator.name": config.aggregator.name, "seed": config.seed} | {
        f"aggregator.{key}": value for key, value in config.aggregator.settings.items()
    }
    assert {key: values[key] for key in chosen} == chosen


def test_the_extra_argument_of_a_served_again_run_is_harmless(sweep, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    chosen = choices(sweep)
    again = command_of(sweep, {**chosen, "_wandb": {}})
    assert any(word.startswith("_wandb=") for word in again)
    assert configuration(again[5:]) == configuration(command_of(sweep, chosen)[5:])


def test_every_listed_method_exists():
    (grid,) = [yaml.safe_load(path.read_text()) for path in SWEEPS if path.stem == "methods_grid"]
    methods = grid["parameters"]["aggregator.name"]["values"]
    assert len(methods) == 7
    assert set(methods) <= set(aggregator_names())
    assert len(grid["parameters"]["seed"]["values"]) == 10


def test_the_metric_is_one_that_runs_log(sweep):
    assert sweep["metric"]["name"] == "accuracy/received"
