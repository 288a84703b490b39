"""Running cells: what is done, copied, damaged, stopped, and by how many at once."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from jgesr_lightning.cli import main
from jgesr_lightning.config import Config, load_config, to_dict
from jgesr_lightning.files import InUseError, locked
from jgesr_lightning.names import code_of
from jgesr_lightning.study import load_study, runner
from jgesr_lightning.study.processes import programs
from jgesr_lightning.study.runner import Estimate, lock_of, run_cells, state
from tests.study.studies import BASE, ROOT, TWO, cells_of, fake, quiet, write_study


def test_finished_cells_are_not_run_again(tmp_path):
    cells, lines = cells_of(tmp_path, TWO), []
    first = run_cells(cells, fake(0.91), lines.append)
    assert first.finished == [cell.name for cell in cells]
    assert any("91.00 %" in line and "about 1 min 0 s left" in line for line in lines)
    second = run_cells(cells, fake(-1), quiet)
    assert (second.finished, second.failed) == (first.finished, {})
    assert (tmp_path / "runs" / "tiny" / "order.txt").read_text().split() == first.finished


def test_a_study_asked_to_stop_that_had_nothing_left_to_do_was_not_stopped(tmp_path):
    cells = cells_of(tmp_path, TWO)

    def told(line):
        if "[2/2]" in line and "running" in line:
            os.kill(os.getpid(), signal.SIGINT)

    assert run_cells(cells[:1], fake(), told).stopped_by is None
    outcome = run_cells(cells, fake(seconds=1), told)
    stopped = len(outcome.finished) < 2
    assert outcome.stopped_by == ("SIGINT" if stopped else None)


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

    def command(cell, place):
        ran.append(cell.name)
        return fake(0.5)(cell, place)

    assert run_cells(more, command, lines.append).finished == [cell.name for cell in more]
    assert ran == []
    assert "copied from" in lines[0] and "91.00 %" in lines[0]
    assert (more[0].folder / "metrics.csv").is_file() and not (more[0].folder / "checkpoint").exists()
    assert all(cell.is_finished() for cell in more)
    for copy in more:  # it speaks of itself: what goes on from its config.yaml must not write to where it came from
        summary, source = copy.summary(), first[0].folder.parent / copy.name
        assert summary["copied_from"] == str(source) and summary["name"] == copy.name
        assert load_config(copy.folder / "config.yaml") == copy.config == Config(**summary["config"])
        assert copy.config.output_dir == str(copy.folder.parent) != str(source.parent)
    # what is measured how often is a setting too, when it comes to taking over another study's files
    often = load_study(tmp_path / "other.yaml", [f"output_dir={tmp_path / 'runs'}", "evaluation.every=2"])[1]
    for cell in more:
        cell.folder.rename(cell.folder.with_name(f"old_{cell.name}"))
    run_cells(often, command, quiet)
    assert ran == [cell.name for cell in often]


@pytest.mark.parametrize(
    ("settings", "ran"),
    [
        ("data: [synthetic]", 1),
        ("data: [tensors]\nsettings: {data.root: one.npz}", 2),
        ("data: ['./mine.py:blobs']", 2),
        ("data: [synthetic]\nsettings: {model.name: './mine.py:net'}", 2),
        ("data: [synthetic]\nsettings: {data.partition: lists.json}", 2),
    ],
)
def test_what_rests_on_files_of_ones_own_is_run_and_not_copied(tmp_path, monkeypatch, settings, ran):
    monkeypatch.chdir(tmp_path)  # data or code may have changed since
    (tmp_path / "mine.py").write_text("def blobs(root): ...\ndef net(in_channels, image_size, num_classes): ...\n")
    (tmp_path / "lists.json").write_text("[[0, 1], [2, 3]]")
    lines = []
    for name in ("one", "two"):
        write_study(tmp_path, f"methods: [fedavg]\n{settings}\n").rename(tmp_path / f"{name}.yaml")
        cells = load_study(tmp_path / f"{name}.yaml", [f"output_dir={tmp_path / 'runs'}"])[1]
        run_cells(cells, fake(), lines.append)
    assert sum("running" in line for line in lines) == ran


def test_a_cell_that_was_made_with_other_code_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def net(in_channels, image_size, num_classes): ...\n")
    (cell,) = cells_of(tmp_path, "methods: [fedavg]\ndata: [synthetic]\nsettings: {model.name: './mine.py:net'}\n")
    run_cells([cell], fake(), quiet)
    path = cell.folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": code_of(to_dict(cell.config))}))
    lines = []
    run_cells([cell], fake(-1), lines.append)
    assert "finished before," in lines[-1] or any("finished before, 90.00" in line for line in lines)
    (tmp_path / "mine.py").write_text("def net(in_channels, image_size, num_classes): return 1\n")
    run_cells([cell], fake(-1), lines.append)
    told = f"finished before, with another {tmp_path}/mine.py:net: remove {cell.folder} to have it run again"
    assert any(told in line for line in lines)


def test_a_copy_that_was_broken_off_is_no_run(tmp_path):
    (cell,) = cells_of(tmp_path, "methods: [fedavg]\ndata: [synthetic]\n", "local.lr=0.5")
    run_cells([cell], fake(0.91), quiet)
    unfinished = cell.folder.with_name(f".{cell.name}")
    shutil.copytree(cell.folder, unfinished)
    cell.folder.rename(cell.folder.with_name("z"))
    lines = []
    assert run_cells([cell], fake(-1), lines.append).finished == [cell.name]
    assert f"copied from {cell.folder.with_name('z')}, 91.00 %" in lines[0]
    assert not unfinished.exists()


def test_a_method_that_is_called_otherwise_keeps_its_runs(tmp_path):
    text, lines = "methods: {NAME: {name: fedavg, local.lr: 0.02}}\ndata: [synthetic]\n", []
    run_cells(cells_of(tmp_path, text.replace("NAME", "former")), fake(0.91), quiet)
    (cell,) = cells_of(tmp_path, text.replace("NAME", "new"))
    assert run_cells([cell], fake(0.5), lines.append).finished == [cell.name]
    assert "_new_" in cell.name and "91.00 %" in lines[0]


def test_a_failed_cell_is_named_and_the_others_run(tmp_path):
    cells = cells_of(tmp_path, TWO)
    outcome = run_cells(cells, fake(lambda cell: -1 if "local" in cell.name else 0.9), quiet)
    assert outcome.finished == ["synthetic_s0.1_fedavg_seed0"]
    assert outcome.failed == {"synthetic_s0.1_local_seed0": "exit status 1: error: it went wrong"}


def test_an_earlier_attempts_error_is_not_the_reason_of_a_later_failure(tmp_path):
    cell = cells_of(tmp_path, TWO)[0]
    run_cells([cell], fake(-1), quiet)
    killed = programs(
        lambda cell: [sys.executable, "-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 9)"]
    )
    assert run_cells([cell], killed, quiet).failed == {cell.name: "ended by SIGKILL: so far"}
    assert "it went wrong" in (cell.folder.parent / "logs" / f"{cell.name}.log").read_text()


def test_a_program_that_ends_well_but_leaves_no_result_has_failed(tmp_path):
    cells = cells_of(tmp_path, TWO)
    outcome = run_cells(cells, programs(lambda cell: [sys.executable, "-c", ""]), quiet)
    assert len(outcome.failed) == 2


def test_a_cell_that_another_process_runs_is_left_to_it(tmp_path):
    cells = cells_of(tmp_path, TWO)
    with locked(cells[0].folder.parent / ".locks" / cells[0].name):
        outcome = run_cells(cells, fake(), quiet)
    assert outcome.elsewhere == [cells[0].name]
    assert outcome.finished == [cells[1].name]
    assert run_cells(cells, fake(), quiet).finished == [cell.name for cell in cells]


def test_a_cell_that_another_process_has_finished_meanwhile_counts(tmp_path):
    cells = cells_of(tmp_path, TWO)
    lock = locked(cells[0].folder.parent / ".locks" / cells[0].name)
    lock.__enter__()

    def start(cell, place):
        fake()(cells[0], place)  # what the other process does
        lock.__exit__(None, None, None)
        return fake(seconds=1)(cell, place)

    outcome = run_cells(cells, start, quiet)
    assert outcome.finished == [cells[1].name, cells[0].name]
    assert outcome.elsewhere == []


def test_a_cell_that_others_only_looked_at_is_run_after_all(tmp_path):
    cells, lines = cells_of(tmp_path, TWO), []
    lock_of(cells[0]).parent.mkdir(parents=True)
    looking = lock_of(cells[0]).open("w")
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `held_since` does, which an estimate and --list ask

    def say(line):
        lines.append(line)
        looking.close()

    outcome = run_cells(cells, fake(0.9), say)
    assert lines[0] == f"[1/2] {cells[0].name}: another process runs it"
    assert (outcome.finished, outcome.elsewhere) == ([cells[1].name, cells[0].name], [])


def test_a_cell_of_a_process_that_died_is_taken_up(tmp_path):
    cells = cells_of(tmp_path, TWO)
    cells[0].folder.mkdir(parents=True)
    left = {"status": "running", "rounds_done": 1, "rounds": 2, "last": {}, "config": to_dict(cells[0].config)}
    (cells[0].folder / "summary.json").write_text(json.dumps(left))
    assert state(cells[0]) == "broken off after round 1 of 2"
    with locked(lock_of(cells[0])):
        assert state(cells[0]) == "running after round 1 of 2"
    assert run_cells(cells, fake(), quiet).finished == [cell.name for cell in cells]
    assert (tmp_path / "runs" / "tiny" / "order.txt").read_text().split() == [cell.name for cell in cells]


def test_the_time_left_goes_by_kinds(tmp_path):
    text = "methods: [local, cfl]\ndata: {synthetic: {}, mnist: {}}\ngrid: {data.fraction: [0.1, 1.0]}\nseeds: [0, 1]\n"
    cells, known = cells_of(tmp_path, text), Estimate()
    assert known.of(cells[0]) == 0

    def cell(data, fraction, method, seed=1):
        return next(c for c in cells if c.name == f"{data}_s0.1_{method}_{fraction:g}_seed{seed}")

    known.note(cell("synthetic", 0.1, "local", 0), 10)
    assert known.of(cell("mnist", 1.0, "cfl")) == 10  # nothing nearer is known
    known.note(cell("synthetic", 1.0, "cfl", 0), 200)
    known.note(cell("synthetic", 0.1, "cfl", 0), 30)
    known.note(cell("synthetic", 0.1, "cfl", 0), 30)
    assert known.of(cell("synthetic", 0.1, "local")) == 10
    assert known.of(cell("synthetic", 0.1, "cfl")) == 30
    assert known.of(cell("synthetic", 1.0, "local")) == 200  # the same data before the same method
    assert known.of(cell("mnist", 1.0, "cfl")) == pytest.approx(80)


def test_the_time_left_counts_the_cells_of_others(tmp_path, monkeypatch):
    cells, lines = cells_of(tmp_path, TWO + "seeds: [0, 1, 2]\n"), []
    monkeypatch.setattr(runner, "time", SimpleNamespace(**{**vars(time), "time": lambda: 1e9}))
    with locked(lock_of(cells[0])), locked(lock_of(cells[3])):
        os.utime(lock_of(cells[0]), (0, 1e9))
        os.utime(lock_of(cells[3]), (0, 1e9 - 30))
        run_cells(cells, fake(0.9), lines.append)
    left = [line.rpartition("about ")[2] for line in lines if "about" in line]
    # a minute a cell: three are to come, of others' two 60 and 30 s are left, and whoever is free takes the next
    assert left == ["2 min 0 s left", "1 min 30 s left", "1 min 0 s left", "1 min 0 s left"]


def test_the_time_left_is_no_less_than_that_of_a_cell_that_runs(tmp_path, monkeypatch):
    cells, lines = cells_of(tmp_path, TWO + "seeds: [0, 1]\n")[:3], []
    monkeypatch.setattr(runner, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: 0.0}))
    quick, slow = fake(), fake(seconds=1)
    run_cells(cells, lambda cell, place: (quick if cell is cells[0] else slow)(cell, place), lines.append, workers=8)
    left = [line.rpartition("about ")[2] for line in lines if "about" in line]
    assert left[0] == "1 min 0 s left"  # a minute a cell, two run, and nobody helps them


def test_several_workers_run_each_cell_once(tmp_path):
    cells = cells_of(tmp_path, TWO + "seeds: [0, 1, 2]\n")
    workers = [threading.Thread(target=run_cells, args=(cells, fake(seconds=0.2), quiet)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ran = (tmp_path / "runs" / "tiny" / "order.txt").read_text().split()
    assert sorted(ran) == sorted(cell.name for cell in cells)


def test_listing_runs_nothing(tmp_path, capsys):
    path = write_study(tmp_path, TWO)
    assert main(["study", str(path), "--folder", f"output_dir={tmp_path / 'runs'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'runs' / path.stem}\n"
    assert main(["study", str(path), "--list", f"output_dir={tmp_path / 'runs'}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "synthetic_s0.1_local_seed0: not begun",
        "synthetic_s0.1_fedavg_seed0: not begun",
    ]
    assert not (tmp_path / "runs").exists()


def test_cells_that_run_at_once_have_one_device_each(tmp_path, capsys):
    path = write_study(tmp_path, TWO)
    arguments = ["study", str(path), f"output_dir={tmp_path / 'runs'}", "--workers", "2", "runtime.devices=2"]
    assert main(arguments) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "runtime.devices is 2 for synthetic_s0.1_local_seed0" in line and "--workers" in line
    assert not (tmp_path / "runs").exists()


DAMAGED = {"no result": '{"status": "finished"}', "list": "[]", "null": "null", "deep": "[" * 100_000, "half": "{"}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_cell_with_a_damaged_summary_is_named_and_run_again(tmp_path, kind, capsys):
    cells, lines = cells_of(tmp_path, TWO), []
    run_cells(cells, fake(0.5), quiet)
    (cells[0].folder / "summary.json").write_text(DAMAGED[kind])
    main(["study", str(tmp_path / "tiny.yaml"), "--list", f"output_dir={tmp_path / 'runs'}"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{cells[0].name}: damaged, summary.json")
    assert len(shown) == 2
    assert run_cells(cells, fake(0.9), lines.append).finished == [cell.name for cell in cells]
    assert "damaged, summary.json" in lines[0] and "run again" in lines[0]
    assert cells[0].summary()["last"] == {"accuracy/received": 0.9}
    assert cells[1].summary()["last"] == {"accuracy/received": 0.5}


def test_a_cell_whose_lock_is_a_link_has_failed_and_the_others_run(tmp_path):
    cells = cells_of(tmp_path, TWO)
    locks = cells[0].folder.parent / ".locks"
    locks.mkdir(parents=True)
    (tmp_path / "precious").write_text("of somebody's")
    (locks / cells[0].name).symlink_to(tmp_path / "precious")
    outcome = run_cells(cells, fake(0.5), quiet)
    assert outcome.finished == [cells[1].name]
    assert "symbolic link" in outcome.failed[cells[0].name]
    assert (tmp_path / "precious").read_text() == "of somebody's"


@pytest.mark.parametrize("count", ["x", "0", "9" * 5000], ids=len)
def test_what_is_no_number_of_workers_is_refused_with_what_would_do(tmp_path, capsys, count):
    path = write_study(tmp_path, TWO)
    assert main(["study", str(path), "--list", "--workers", count]) == 2
    assert f"argument --workers: '{count}' is no number of processes; write 1 or more" in capsys.readouterr().err


def test_numbers_that_differ_by_rounding_are_one_cell(tmp_path):
    run_cells(cells_of(tmp_path, TWO + "settings: {local.lr: 0.3}\n"), fake(0.5), quiet)
    again = cells_of(tmp_path, TWO + f"settings: {{local.lr: {0.1 + 0.2!r}}}\n")
    assert again[0].config.local.lr != 0.3
    assert all(cell.is_finished() for cell in again)
    assert not any(cell.is_finished() for cell in cells_of(tmp_path, TWO + "settings: {local.lr: 0.3001}\n"))


def test_several_cells_run_at_once_and_never_more(tmp_path):
    cells = cells_of(tmp_path, TWO + "seeds: [0, 1, 2]\n")
    running, most, slots = set(), [], []
    start = fake(seconds=0.3)

    class Watched:
        def __init__(self, cell, place):
            running.add(cell.name)
            most.append(len(running))
            slots.append(place.slot)
            self.cell, self.child = cell, start(cell, place)
            self.pid = self.child.pid

        def poll(self):
            status = self.child.poll()
            if status is not None:
                running.discard(self.cell.name)
            return status

    outcome = run_cells(cells, Watched, quiet, workers=3)
    assert sorted(outcome.finished) == sorted(cell.name for cell in cells)
    assert max(most) == 3
    assert set(slots) == {0, 1, 2}


def test_a_cell_that_is_killed_is_named_by_its_signal_and_the_study_goes_on(tmp_path):
    cells = cells_of(tmp_path, TWO)
    crash = programs(
        lambda cell: [sys.executable, "-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 11)"]
    )
    well = fake()
    outcome = run_cells(cells, lambda cell, place: (crash if "local" in cell.name else well)(cell, place), quiet)
    assert outcome.failed == {cells[0].name: "ended by SIGSEGV: so far"}
    assert outcome.finished == [cells[1].name]


def test_all_cells_end_at_once_also_one_that_leads_no_group_yet(tmp_path):
    cells, children = cells_of(tmp_path, TWO), []

    def interrupted():
        raise KeyboardInterrupt

    def start(cell, place):
        children.append(subprocess.Popen(["sleep", "60"], start_new_session=bool(children)))
        return SimpleNamespace(pid=children[-1].pid, poll=interrupted)

    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, start, quiet, workers=2)
    assert [child.wait(20) for child in children] == [-signal.SIGKILL] * 2


def test_a_study_goes_on_when_nobody_reads_its_lines(tmp_path):
    write_study(tmp_path, TWO)
    program = (
        "import sys; from jgesr_lightning.study import command, processes; from tests.study.studies import fake\n"
        "command.training = lambda run, workers, fork: fake(0.5)\n"
        f"sys.exit(command.main([{str(tmp_path / 'tiny.yaml')!r}, 'output_dir={tmp_path / 'runs'}'], run=None))"
    )
    line = f'{sys.executable} -c "$0" 2> {tmp_path / "err"} | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line, program], cwd=ROOT, capture_output=True, text=True, check=True)
    told = (tmp_path / "err").read_text()
    assert done.stdout.split() == ["0"], told
    assert told.count("stdout cannot be written (Broken pipe); the study goes on") == 1
    assert "tiny: 2 of 2 cells finished" in told and "Traceback" not in told and "Exception ignored" not in told


def start(folder, *arguments):
    """Start the study of two cells as a user does; its output goes to a file."""
    command = [
        sys.executable,
        "-m",
        "jgesr_lightning",
        "study",
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


def is_held(folder, cell):
    try:
        with locked(folder / "runs" / "tiny" / ".locks" / cell):
            return False
    except InUseError:
        return True


@pytest.mark.processes
def test_a_study_of_two_cells_killed_stopped_and_resumed(tmp_path):
    write_study(tmp_path, TWO, BASE.replace("rounds: 2", "rounds: 20"))
    first, second = "synthetic_s0.1_local_seed0", "synthetic_s0.1_fedavg_seed0"
    study = start(tmp_path)
    wait_for(lambda: rounds_done(tmp_path, first) >= 2, study)
    study.kill()
    assert study.wait(60) == -signal.SIGKILL
    assert is_held(tmp_path, first)
    assert rounds_done(tmp_path, second) == 0
    end = time.monotonic() + 120
    while rounds_done(tmp_path, first) < 20:  # the run outlives the study that started it
        assert time.monotonic() < end
        time.sleep(0.1)
    free = False
    while not free:  # and keeps its lock until it ends
        assert time.monotonic() < end
        free = not is_held(tmp_path, first)

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
