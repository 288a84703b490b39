import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jgesr_lightning.config import ConfigError, load_config, to_dict
from jgesr_lightning.study import choose, load_study, main, parse_part, run_cells
from jgesr_lightning.timing import duration

ROOT = Path(__file__).parent.parent
BASE = """
clients: 4
rounds: 2
aggregator: {name: fedavg}
data: {name: synthetic, fraction: 0.2}
local: {epochs: 1}
runtime: {accelerator: cpu, devices: 1}
logging: {wandb: false}
"""

FAKE = """
import json, pathlib, sys, time
folder, result, config, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
time.sleep(seconds)
folder.mkdir(parents=True, exist_ok=True)
with (folder.parent / "order.txt").open("a") as file:
    file.write(folder.name + "\\n")
print("a line of output")
if result < 0:
    print("error: it went wrong")
    print("and this is printed later")
    sys.exit(1)
(folder / "summary.json").write_text(json.dumps({"status": "finished", "last": {"accuracy/received": result},
    "seconds": {"total": 60.0}, "config": json.loads(config)}))
"""


def write_study(folder, text, base=BASE):
    (folder / "base.yaml").write_text(base)
    path = folder / "tiny.yaml"
    path.write_text(f"base: {folder / 'base.yaml'}\n{text}")
    return path


def cells_of(folder, text, *overrides):
    return load_study(write_study(folder, text), [f"output_dir={folder / 'runs'}", *overrides])[1]


def fake(result=0.9, seconds=0.0):
    """Return a program that writes a cell's summary as a training run does, or fails where the result is negative."""

    def command(cell):
        value = result(cell) if callable(result) else result
        return [
            sys.executable,
            "-c",
            FAKE,
            str(cell.folder),
            str(value),
            json.dumps(to_dict(cell.config)),
            str(seconds),
        ]

    return command


def quiet(line):
    pass


TWO = "methods: {local: {}, fedavg: {}}\ndata: [synthetic]\n"


def test_a_study_is_the_product_of_its_axes_seeds_first(tmp_path):
    cells = cells_of(
        tmp_path,
        """
settings: {rounds: 3, local: {lr: 0.5}}
methods:
  fedavg:
  prox_strong: {name: fedprox, mu_prox: 1.0, local.momentum: 0.5}
data: {synthetic: {data.fraction: 0.5}}
noise: [0.1, 1]
missing_rate: [0.0, 0.05]
seeds: [0, 4]
""",
    )
    assert len(cells) == 16
    assert [cell.name for cell in cells[:3]] == [
        "synthetic_s0.1_m0.0_fedavg_seed0",
        "synthetic_s0.1_m0.0_prox_strong_seed0",
        "synthetic_s0.1_m0.05_fedavg_seed0",
    ]
    last = cells[-1]
    assert last.name == "synthetic_s1_m0.05_prox_strong_seed4"
    assert last.folder == tmp_path / "runs" / "tiny" / last.name
    config = last.config
    assert (config.aggregator.name, config.aggregator.settings) == ("fedprox", {"mu_prox": 1.0})
    assert (config.seed, config.channel.noise, config.channel.missing_rate) == (4, 1.0, 0.05)
    assert (config.rounds, config.local.lr, config.local.momentum, config.data.fraction) == (3, 0.5, 0.5, 0.5)
    assert cells[0].config.local.momentum == 0.0
    for cell in cells:  # what the command line makes of the arguments
        assert repr(load_config(cell.base, cell.overrides)) == repr(cell.config)


def test_the_nearer_setting_wins(tmp_path):
    study = """
settings: {local.lr: 0.1, data.kappa: 0.1, rounds: 9}
methods: {fedavg: {local.lr: 0.2}}
data: {synthetic: {data.kappa: 0.2}}
"""
    (cell,) = cells_of(tmp_path, study, "rounds=1", "--clients=5")
    config = cell.config
    assert (config.local.lr, config.data.kappa, config.rounds, config.clients) == (0.2, 0.2, 1, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: {local: {}}\nnoises: [1]\n", "unknown key noises (did you mean 'noise'?)"),
        ("noise: [1]\n", "methods is missing"),
        ("methods: {fedavg: {mu_proxx: 1}}\ndata: [synthetic]\n", "mu_proxx"),
        ("methods: {fedavgg: {}}\ndata: [synthetic]\n", "fedavg"),
        ("methods: {local: {}}\ndata: [synthetic]\nnoise: [-1]\n", "channel.noise"),
        ("methods: {local: {}}\ndata: [synthetic]\nseeds: []\n", "seeds must be a list"),
        ("methods: {local: {}}\ndata: [synthetic]\nseeds: [0, 0]\n", "comes twice"),
        ("methods: [1, {a: 2}]\n", "methods must be"),
        ("methods: {local: {}\n", "not valid YAML"),
    ],
)
def test_a_wrong_study_stops_before_any_work(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        cells_of(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["seed=3", "name=x", "aggregator.name=local", "nonsense", "local.lrr=1"])
def test_overrides_that_make_no_sense_for_all_cells_are_refused(tmp_path, override):
    with pytest.raises(ConfigError):
        cells_of(tmp_path, TWO, override)


def test_an_unknown_study_names_those_there_are():
    with pytest.raises(ConfigError, match=r"no study table1_smal \(did you mean 'table1_small'\?\)"):
        load_study("table1_smal")


def test_choosing_by_pattern_and_part(tmp_path):
    cells = cells_of(tmp_path, TWO + "seeds: [0, 1, 2]\n")
    names = [cell.name for cell in choose(cells, ["local"])]
    assert names == [f"synthetic_s0.1_local_seed{seed}" for seed in range(3)]
    assert len(choose(cells, ["*_seed1", "local"])) == 4
    parts = [choose(cells, part=(part, 4)) for part in (1, 2, 3, 4)]
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in cells)
    with pytest.raises(ConfigError, match="matches no cell"):
        choose(cells, ["fedprox"])


def test_part_from_text_or_from_slurm():
    assert parse_part(None, {}) == (1, 1)
    assert parse_part("2/3", {"SLURM_ARRAY_TASK_ID": "9"}) == (2, 3)
    array = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_STEP": "2"}
    assert parse_part(None, {**array, "SLURM_ARRAY_TASK_COUNT": "5"}) == (3, 5)
    for wrong in ("0/3", "4/3", "x", "1/0"):
        with pytest.raises(ConfigError, match="i/n"):
            parse_part(wrong, {})


def test_finished_cells_are_not_run_again(tmp_path):
    cells, lines = cells_of(tmp_path, TWO), []
    first = run_cells(cells, fake(0.91), lines.append)
    assert first.finished == [cell.name for cell in cells]
    assert any("91.00 %" in line and "about 1 min 0 s left" in line for line in lines)
    second = run_cells(cells, fake(-1), quiet)
    assert (second.finished, second.failed) == (first.finished, {})
    assert (tmp_path / "runs" / "tiny" / "order.txt").read_text().split() == first.finished


def test_a_cell_finished_with_other_settings_does_not_count(tmp_path):
    run_cells(cells_of(tmp_path, TWO), fake(), quiet)
    changed = cells_of(tmp_path, TWO, "local.lr=0.5")
    assert not any(cell.is_finished() for cell in changed)
    unchanged_in_effect = cells_of(tmp_path, TWO, "evaluation.every=2", "logging.tags=[a]")
    assert all(cell.is_finished() for cell in unchanged_in_effect)
    failed = run_cells(changed[:1], fake(-1), quiet).failed[changed[0].name]
    assert failed == f"exit status 1: error: it went wrong; to run the cell anew, remove {changed[0].folder}"


def test_a_cell_that_a_study_beside_this_one_has_finished_is_copied(tmp_path):
    first = cells_of(tmp_path, TWO)
    run_cells(first, fake(0.91), quiet)
    (first[0].folder / "checkpoint").mkdir()
    (first[0].folder / "metrics.csv").write_text("round\n")
    (tmp_path / "tiny.yaml").rename(tmp_path / "other.yaml")
    damaged = tmp_path / "runs" / "damaged" / "run" / "summary.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"status": "finished", "config": null}')
    text = [f"output_dir={tmp_path / 'runs'}"]
    more, lines = load_study(tmp_path / "other.yaml", text)[1], []
    ran = []

    def command(cell):
        ran.append(cell.name)
        return fake(0.5)(cell)

    assert run_cells(more, command, lines.append).finished == [cell.name for cell in more]
    assert ran == []
    assert "copied from" in lines[0] and "91.00 %" in lines[0]
    assert (more[0].folder / "metrics.csv").is_file() and not (more[0].folder / "checkpoint").exists()
    assert all(cell.is_finished() for cell in more)
    # what is measured how often is a setting too, when it comes to taking over another study's files
    often = load_study(tmp_path / "other.yaml", [f"output_dir={tmp_path / 'runs'}", "evaluation.every=2"])[1]
    for cell in more:
        cell.folder.rename(cell.folder.with_name(f"old_{cell.name}"))
    run_cells(often, command, quiet)
    assert ran == [cell.name for cell in often]


def test_a_failed_cell_is_named_and_the_others_run(tmp_path):
    cells = cells_of(tmp_path, TWO)
    outcome = run_cells(cells, fake(lambda cell: -1 if "local" in cell.name else 0.9), quiet)
    assert outcome.finished == ["synthetic_s0.1_fedavg_seed0"]
    assert outcome.failed == {"synthetic_s0.1_local_seed0": "exit status 1: error: it went wrong"}


def test_a_program_that_ends_well_but_leaves_no_result_has_failed(tmp_path):
    cells = cells_of(tmp_path, TWO)
    outcome = run_cells(cells, lambda cell: [sys.executable, "-c", ""], quiet)
    assert len(outcome.failed) == 2


def test_a_cell_that_another_process_runs_is_left_to_it(tmp_path):
    cells = cells_of(tmp_path, TWO)
    locks = cells[0].folder.parent / ".locks"
    locks.mkdir(parents=True)
    with (locks / cells[0].name).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        outcome = run_cells(cells, fake(), quiet)
    assert outcome.elsewhere == [cells[0].name]
    assert outcome.finished == [cells[1].name]
    assert run_cells(cells, fake(), quiet).finished == [cell.name for cell in cells]


def test_several_workers_run_each_cell_once(tmp_path):
    cells = cells_of(tmp_path, TWO + "seeds: [0, 1, 2]\n")
    workers = [threading.Thread(target=run_cells, args=(cells, fake(seconds=0.2), quiet)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ran = (tmp_path / "runs" / "tiny" / "order.txt").read_text().split()
    assert sorted(ran) == sorted(cell.name for cell in cells)


def test_durations():
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 86400)] == [
        "0 s",
        "1 min 0 s",
        "59 min 59 s",
        "24 h 0 min",
    ]


def test_listing_runs_nothing(tmp_path, capsys):
    path = write_study(tmp_path, TWO)
    assert main([str(path), "--folder", f"output_dir={tmp_path / 'runs'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'runs' / path.stem}\n"
    assert main([str(path), "--list", f"output_dir={tmp_path / 'runs'}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "synthetic_s0.1_local_seed0: not begun",
        "synthetic_s0.1_fedavg_seed0: not begun",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_are_valid(path):
    name, cells = load_study(path)
    assert name == path.stem
    assert len(cells) > 1


def test_the_papers_studies_hold_the_papers_cells():
    _, cells = load_study("table1")
    combinations = {(c.config.data.name, c.config.channel.noise, c.config.seed) for c in cells}
    assert len(combinations) == 2 * 2 * 10
    assert len(cells) == 9 * len(combinations)
    assert all((c.config.rounds, c.config.clients, c.config.data.fraction) == (30, 20, 1.0) for c in cells)
    _, cells = load_study("missing")
    assert sorted({c.config.channel.missing_rate for c in cells}) == [rate / 100 for rate in range(11)]


def start(folder, *arguments):
    """Start the study of two cells as a user does; its output goes to a file."""
    command = [
        sys.executable,
        "-m",
        "jgesr_lightning.study",
        str(folder / "tiny.yaml"),
        f"output_dir={folder / 'runs'}",
    ]
    with (folder / "out.txt").open("a") as out:
        return subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=out, stderr=out, start_new_session=True)


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)


def rounds_done(folder, cell):
    try:
        return json.loads((folder / "runs" / "tiny" / cell / "summary.json").read_text())["rounds_done"]
    except (OSError, ValueError):
        return 0


@pytest.mark.processes
def test_a_study_of_two_cells_killed_stopped_and_resumed(tmp_path):
    write_study(tmp_path, TWO, BASE.replace("rounds: 2", "rounds: 20"))
    first, second = "synthetic_s0.1_local_seed0", "synthetic_s0.1_fedavg_seed0"
    study = start(tmp_path)
    wait_for(lambda: rounds_done(tmp_path, first) >= 2, study)
    study.kill()
    assert study.wait(60) == -signal.SIGKILL
    assert rounds_done(tmp_path, second) == 0
    end = time.monotonic() + 120
    while rounds_done(tmp_path, first) < 20:  # the run outlives the study that started it
        assert time.monotonic() < end
        time.sleep(0.1)
    with (tmp_path / "runs" / "tiny" / ".locks" / first).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # and keeps its lock until it ends

    study = start(tmp_path)
    wait_for(lambda: rounds_done(tmp_path, second) >= 2, study)
    os.kill(study.pid, signal.SIGINT)
    assert study.wait(60) == 1
    assert 2 <= rounds_done(tmp_path, second) < 20
    assert "the same command goes on from here" in (tmp_path / "out.txt").read_text()

    assert start(tmp_path).wait(240) == 0
    for cell in (first, second):
        summary = json.loads((tmp_path / "runs" / "tiny" / cell / "summary.json").read_text())
        assert (summary["status"], summary["rounds_done"]) == ("finished", 20)
        rows = (tmp_path / "runs" / "tiny" / cell / "metrics.csv").read_text().splitlines()
        assert [int(row.split(",")[0]) for row in rows[1:]] == list(range(21))
