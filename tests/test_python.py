"""The package as a library: a run from Python, in a notebook, from `python -c` and from standard input."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from nbclient import NotebookClient

from jgesr_lightning import Result, load_config
from jgesr_lightning.config import ConfigError

ROOT = Path(__file__).parent.parent
SETTINGS = (
    "data.name=synthetic data.fraction=0.1 clients=4 rounds=2 local.epochs=1 local.batch_size=8 logging.wandb=false "
    "aggregator.name=fedavg"
)


def test_overrides_may_be_one_text():
    assert load_config("mnist_quick", "rounds=3 seed=7") == load_config("mnist_quick", ["rounds=3", "seed=7"])


def test_a_result_leads_to_what_the_run_found(tmp_path):
    from jgesr_lightning import run

    result = run(load_config("mnist_quick", f"{SETTINGS} runtime.devices=1 output_dir={tmp_path}"))
    assert isinstance(result.metrics, pd.DataFrame)
    assert result.metrics["round"].tolist() == [0, 1, 2]
    assert len(result.clients) == 3 * 4
    assert result.graph.shape == (4, 4)
    torch.testing.assert_close(result.graph.sum(1), torch.ones(4, dtype=torch.float64))
    assert result.models.client(3).client == 3
    assert repr(result.models) == f"Trained('{result.folder}': received and trained models of 4 clients)"


class Watching:
    """Callbacks of somebody's own: every hook, and a number of its own for each round."""

    def __init__(self):
        self.told = []

    def on_federation_start(self, plan, state):
        self.told.append("start")

    def on_client_trained(self, row, client, state_dict):
        self.told.append((client, len(state_dict) > 1))

    def on_round_end(self, plan, state, record, watch):
        self.told.append(record.round)
        record.metrics["mine/number"] = float(record.round * 2)

    def on_federation_end(self, plan, state, status):
        self.told.append(status)


def test_callbacks_of_ones_own_are_told_and_add_to_what_is_written(tmp_path):
    from jgesr_lightning import run

    config = load_config("mnist_quick", f"{SETTINGS} runtime.devices=1 output_dir={tmp_path} name=watched")
    watching = Watching()
    result = run(config, callbacks=[watching])
    assert watching.told[:2] == ["start", 0] and watching.told[6] == 1 and watching.told[11:] == [2, "finished"]
    assert sorted(watching.told[2:6]) == sorted(watching.told[7:11]) == [(client, True) for client in range(4)]
    assert result.metrics["mine/number"].tolist() == [0, 2, 4]
    plain = run(config.replace(name="plain"))
    for frame in ("metrics", "clients"):
        with_it, without = (
            getattr(each, frame).filter(regex="^(?!seconds|aggregator/seconds|mine)") for each in (result, plain)
        )
        timed = [name for name in without if "seconds" in name]
        pd.testing.assert_frame_equal(with_it.drop(columns=timed), without.drop(columns=timed))


class Adding:
    """A callback that adds one thing to the record of round 1."""

    def __init__(self, **added):
        self.added = added

    def on_round_end(self, plan, state, record, watch):
        if record.round == 1:
            for place, value in self.added.items():
                getattr(record, place)["mine"] = value


def with_callback(tmp_path, callback):
    from jgesr_lightning import run

    settings = f"{SETTINGS} data.name=synthetic data.fraction=0.1 runtime.devices=1 output_dir={tmp_path} name=own"
    return run(load_config("mnist_quick", settings), callbacks=callback)


@pytest.mark.parametrize("value", [torch.tensor(1.5), np.float32(1.5), np.array([1.5])[0], torch.tensor(1.5).numpy()])
def test_numbers_of_other_libraries_are_numbers_in_a_record(tmp_path, value):
    result = with_callback(tmp_path, [Adding(metrics=value, clients=[value] * 4, info={"a": value})])
    assert result.metrics["mine"].tolist()[1] == 1.5
    assert result.clients["mine"].tolist()[4:8] == [1.5] * 4


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"metrics": "text"}, r"a callback's 'mine' in a record's metrics is a str; it must be a number"),
        ({"metrics": torch.ones(2)}, r"'mine' in a record's metrics is a Tensor; it must be a number"),
        ({"metrics": "0.5"}, r"'mine' in a record's metrics is a str; it must be a number"),
        ({"metrics": 10**400}, r"'mine' in a record's metrics is a int; it must be a number"),
        ({"clients": {1, 2}}, r"a callback's 'mine' in a record's clients must be 4 numbers, one for each client"),
        ({"clients": 3.0}, r"'mine' in a record's clients must be 4 numbers"),
        ({"clients": [1.0] * 3}, r"'mine' in a record's clients must be 4 numbers"),
        ({"clients": ["x"] * 4}, r"'mine' in a record's clients must be 4 numbers"),
        ({"info": object()}, r"a callback's 'mine' in a record's info is a object"),
    ],
)
def test_what_is_no_number_in_a_record_is_accounted_for(tmp_path, added, said):
    from jgesr_lightning.failure import RunError

    with pytest.raises(RunError, match=said):
        with_callback(tmp_path, [Adding(**added)])
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["status"] == "failed" and "mine" in summary["reason"]


@pytest.mark.parametrize("table", ["metrics", "clients", "info"])
def test_what_has_no_name_in_a_record_is_accounted_for(tmp_path, table):
    from jgesr_lightning.failure import RunError

    class Numbering:
        def on_round_end(self, plan, state, record, watch):
            getattr(record, table)[3] = [0.5] * 4

    with pytest.raises(RunError, match=f"a callback's 3 in a record's {table} is no name; it must be a text"):
        with_callback(tmp_path, [Numbering()])


class Misspelt:
    def on_round_ends(self, *_):
        pass


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (Watching(), r"^callbacks is a Watching; it must be a list of objects$"),
        ([Watching], r"^callbacks holds the class Watching; give an object of it, Watching\(\)$"),
        (
            [Misspelt()],
            r"^Misspelt.on_round_ends is no hook \(did you mean 'on_round_end'\?\); there are ",
        ),
        ([object()], r"^callbacks holds a object, which has none of on_federation_start, "),
    ],
)
def test_a_callback_that_nobody_would_call_is_refused(tmp_path, callbacks, said):
    with pytest.raises(ConfigError, match=said):
        with_callback(tmp_path, callbacks)
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_configuration_is_none_yet():
    from jgesr_lightning import run

    with pytest.raises(ConfigError, match=r"^run takes a configuration, as load_config returns one; got a str$"):
        run("mnist_quick")


def settings_of_libraries():
    return {
        "deterministic": torch.get_deterministic_debug_mode(),
        "filling": torch.utils.deterministic.fill_uninitialized_memory,
        "dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "levels": [logging.getLogger(f"lightning.{package}").level for package in ("fabric", "pytorch")],
        "variables": dict(os.environ),
    }


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_what_a_program_has_set_in_libraries_changes_no_run_and_is_given_back(tmp_path, monkeypatch, engine):
    from jgesr_lightning import run

    def models(name):
        settings = f"{SETTINGS} channel.missing_rate=0.2 engine={engine} runtime.devices=1 output_dir={tmp_path}"
        result = run(load_config("mnist_quick", f"{settings} name={name}"))
        return torch.cat([p.detach().flatten() for p in result.models.client(0).parameters()])

    straight = models("straight")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.setattr(logging.getLogger("lightning.fabric"), "level", logging.INFO)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            before = settings_of_libraries()
            other = models("other")
            assert settings_of_libraries() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(straight, other)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"\xff\xfe\x00"])
def test_files_that_are_damaged_or_gone_are_named(tmp_path, content):
    result = Result("finished", tmp_path, 2)
    for name, read in (("metrics.csv", lambda: result.metrics), ("graphs.npz", lambda: result.graph)):
        with pytest.raises(ConfigError, match=name):
            read()
        (tmp_path / name).write_bytes(content)
        if name == "graphs.npz" or content != b"PK\x03\x04 no archive":  # which reads as a table of one column
            with pytest.raises(ConfigError, match=name):
                read()


@pytest.mark.processes
@pytest.mark.parametrize("way", ["-c", "stdin"])
def test_it_runs_without_a_script(tmp_path, way):
    code = (
        "from jgesr_lightning import load_config, run\n"
        f"result = run(load_config('mnist_quick', '{SETTINGS} output_dir={tmp_path}'))\n"
        "print(result.status, len(result.metrics))\n"
    )
    call = [sys.executable, "-c", code] if way == "-c" else [sys.executable, "-"]
    done = subprocess.run(
        call, input=None if way == "-c" else code, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["finished", "3"]


@pytest.mark.processes
def test_a_script_of_several_runs_keeps_the_processes_of_the_first_that_has_some(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from jgesr_lightning import load_config, run\n"
        "rank = os.environ.get('LOCAL_RANK', '0')\n"
        "for name, devices in (('alone', 1), ('both', 2), ('again', 'auto'), ('other', 1)):\n"
        "    settings = f'name={name} runtime.accelerator=cpu runtime.devices={devices}'\n"
        "    try:\n"
        f"        result = run(load_config('mnist_quick', '{SETTINGS} output_dir={tmp_path} ' + settings))\n"
        "        said = f'{result.status} {result.rounds_done}'\n"
        "    except ValueError as error:\n"
        "        said = error\n"
        "    sys.stdout.write(f'{rank} {name} {said}\\n')\n"  # at once, as both write to one pipe
        "    sys.stdout.flush()\n"
    )
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = [f"{rank} {name} finished 2" for rank in (0, 1) for name in ("alone", "both", "again")]
    refused = "runtime.devices is 1, but an earlier run of this program started 2 processes, which stay: set"
    said = sorted(line.partition(" runtime.devices=2")[0] for line in done.stdout.splitlines())
    assert said == sorted([*runs, f"0 other {refused}", "1 other failed 0"])
    assert not list(tmp_path.glob("*/traceback*"))


@pytest.mark.processes
def test_it_runs_in_a_notebook(tmp_path):
    cell = (
        "from jgesr_lightning import load_config, run\n"
        f"result = run(load_config('mnist_quick', '{SETTINGS} output_dir={tmp_path}'))\n"
        "result.status"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = notebook.cells[0].outputs
    assert outputs[-1]["data"]["text/plain"] == "'finished'"
    shown = "".join(output.get("text", "") for output in outputs if output["output_type"] == "stream")
    assert "round 2/2" in shown
    assert shown.count("\n") < 15  # a bar, not a line a round


@pytest.mark.processes
def test_the_notebook_of_the_documentation_runs():
    path = ROOT / "docs" / "six_clients.ipynb"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert "<Figure" in str(notebook.cells)
