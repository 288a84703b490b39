"""The sweep files: W&B's schema takes them, and the command that an agent builds from them is a run of ours."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from wandb import wandb_agent
from wandb.sdk.launch.sweeps import utils as sweeps

from jgesr_lightning.aggregators import aggregator_names
from jgesr_lightning.cli import configuration
from jgesr_lightning.config import load_config
from jgesr_lightning.run_folder import run_folder

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


def arguments_of(words):
    """Return what a command gives to our program, the shell's part left out."""
    at = words.index("-c")
    assert words[:at] == ["/usr/bin/env", "sh"]
    assert words[at + 1].endswith('-m jgesr_lightning train "$@"')
    assert words[at + 2] == "train"  # the shell's own name
    return words[at + 3 :]


def test_what_the_agent_runs_is_a_run_of_ours(sweep):
    chosen = choices(sweep)
    config = configuration(arguments_of(command_of(sweep, chosen)))
    values = {"aggregator.name": config.aggregator.name, "seed": config.seed} | {
        f"aggregator.{key}": value for key, value in config.aggregator.settings.items()
    }
    assert {key: values[key] for key in chosen} == chosen


def test_the_extra_argument_of_a_served_again_run_is_harmless(sweep):
    chosen = choices(sweep)
    again = command_of(sweep, {**chosen, "_wandb": {}})
    assert any(word.startswith("_wandb=") for word in again)
    assert configuration(arguments_of(again)) == configuration(arguments_of(command_of(sweep, chosen)))


def run_by_agent(sweep, folder, monkeypatch, extra):
    """Have W&B's own agent run a sweep's command in `folder`, with no Python of ours on the path; return the status."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", "")
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="s1")
    agent._sweep_command = sweep["command"]  # as it reads it from the server
    args = {key: {"value": value} for key, value in extra.items()}
    agent._command_run({"type": "run", "run_id": "r1", "program": "", "args": args})
    return agent._run_processes["r1"].wait()


def test_an_agent_runs_it_with_its_own_python(sweep, tmp_path, monkeypatch):
    package = tmp_path / "jgesr_lightning"  # in the folder that it runs in: found before the real one
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, pathlib, sys\npathlib.Path('seen.json').write_text(json.dumps([sys.executable, sys.argv[1:]]))\n"
    )
    assert run_by_agent(sweep, tmp_path, monkeypatch, {"seed": 3, "aggregator.name": "two words"}) == 0
    executable, arguments = json.loads((tmp_path / "seen.json").read_text())
    assert os.path.realpath(executable) == os.path.realpath(sys.executable)
    assert Path(executable).parent == Path(sys.executable).parent  # of the same environment
    assert arguments == ["train", "mnist_s01", "seed=3", "aggregator.name=two words"]


def test_a_run_under_an_agent_is_done(tmp_path, monkeypatch):
    sweep = yaml.safe_load(SWEEPS[0].read_text())
    small = {
        "data.name": "synthetic", "data.fraction": 0.1, "clients": 4, "rounds": 1, "local.epochs": 1,
        "runtime.devices": 1, "aggregator.name": "fedavg",
    }  # fmt: skip
    assert run_by_agent(sweep, tmp_path, monkeypatch, small) == 0
    summary = json.loads((tmp_path / "runs" / "mnist_s01-r1" / "summary.json").read_text())
    assert (summary["status"], summary["method"]) == ("finished", "fedavg")
    written = load_config(tmp_path / "runs" / "mnist_s01-r1" / "config.yaml")  # what to go on with
    folder = Path("runs") / "mnist_s01-r1"
    assert run_folder(written) == folder  # the agent's variables still set
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert run_folder(written) == folder


def test_every_listed_method_exists():
    (grid,) = [yaml.safe_load(path.read_text()) for path in SWEEPS if path.stem == "methods_grid"]
    methods = grid["parameters"]["aggregator.name"]["values"]
    assert len(methods) == 7
    assert set(methods) <= set(aggregator_names())
    assert len(grid["parameters"]["seed"]["values"]) == 10


def test_the_metric_is_one_that_runs_log(sweep):
    assert sweep["metric"]["name"] == "accuracy/received"
