import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jgesr_lightning import cli, experiment
from jgesr_lightning.config import load_config
from jgesr_lightning.data import DataError
from jgesr_lightning.experiment import Result
from jgesr_lightning.federation import NonFiniteError
from tests.reporting.synthetic import make_run

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def ran(monkeypatch):
    """Configurations that were run, instead of running them; `result` is how they end."""
    ran = SimpleNamespace(configs=[], result=Result("finished", Path("runs/x"), 1))

    def run(config):
        ran.configs.append(config)
        if isinstance(ran.result, BaseException):
            raise ran.result
        return ran.result

    monkeypatch.setattr(experiment, "run", run)
    return ran


def one_line(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_arguments_reach_the_run_in_any_order(ran):
    orders = (
        ["configs/mnist_s01.yaml", "seed=3", "--rounds=5"],
        ["rounds=5", "configs/mnist_s01.yaml", "--seed=3"],
        ["--seed=3", "rounds=5", "mnist_s01"],
    )
    for order in orders:
        assert cli.main(["train", *order]) == 0
    assert ran.configs == 3 * [load_config("mnist_s01", ["seed=3", "rounds=5"])]


@pytest.mark.parametrize(("terminal", "rank", "lines"), [(True, "0", 1), (True, "1", 0), (False, "0", 0)])
def test_at_a_terminal_the_first_process_says_that_it_loads(ran, capsys, monkeypatch, terminal, rank, lines):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if rank != "0":  # as a run starts its other processes
        for name, value in {"JGESR_FIRST_PROCESS": "1", "LOCAL_RANK": rank, "MASTER_PORT": "40000"}.items():
            monkeypatch.setenv(name, value)
    assert cli.main(["train", "mnist_s01"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "loading PyTorch and Lightning ...\n" * lines)


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result("finished", Path("x"), 3), 0),
        (Result("stopped", Path("x"), 1, "SIGTERM"), 1),
        (Result("stopped", Path("x"), 1, "SIGINT"), 1),
        (Result("stopped", Path("x"), 1), 1),
        (DataError("mnist: no data"), 2),
        (NonFiniteError("round 3: client 2"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status_says_how_the_run_ended(ran, result, status, capsys):
    ran.result = result
    assert cli.main(["train", "mnist_s01"]) == status
    if isinstance(result, Exception):
        assert one_line(capsys) == f"error: {result}\n"


def test_a_bug_is_not_dressed_up_as_a_mistake_of_the_user(ran, capsys, monkeypatch):
    monkeypatch.delenv("JGESR_DEBUG", raising=False)
    ran.result = ValueError("a bug\nof two lines")
    assert cli.main(["train", "mnist_s01"]) == 1
    assert one_line(capsys).startswith("error: ValueError: a bug of two lines (a fault of this program; JGESR_DEBUG=1")
    monkeypatch.setenv("JGESR_DEBUG", "1")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["train", "mnist_s01"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "mnist_s01", "local.lrr=0.05"],
        ["train", "local=5", "mnist_s01"],
        ["train", "mnist_s01", "--seed", "3"],
        ["train", "mnist_s01", "--quiet"],
        ["train", "mnist_s01", "mnist_s02"],
        ["train", "no_such_file"],
        ["train", "seed=3"],
        ["train"],
        ["config"],
        ["config", "mnist_s01", "rounds=many"],
        ["data"],
        ["data", "seed=3"],
        ["data", "minst"],
        ["data", "mnist", "synthetic.yaml"],
        ["trian", "mnist_s01"],
        ["mnist_s01"],
        ["--verbose"],
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line_and_status_2_and_nothing_runs(ran, arguments, capsys):
    assert cli.main(arguments) == 2
    assert one_line(capsys).startswith("error: ")
    assert ran.configs == []


def test_a_misspelt_command_names_the_nearest(capsys):
    cli.main(["trian", "mnist_s01"])
    assert "did you mean 'train'" in one_line(capsys)


def test_no_command_shows_how_to_use_it(capsys):
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_lists_all_commands(arguments, capsys):
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown and command.summary in shown for name, command in cli.COMMANDS.items())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_own_help_that_ends_with_an_example(command, capsys):
    assert cli.main(["help", command]) == 0
    shown = capsys.readouterr().out
    for arguments in ([command, "--help"], [command, "x", "-h"]):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out == shown
    assert shown.startswith(f"usage: python -m jgesr_lightning {command} ")
    head, example = shown.rstrip().rsplit("\n", 1)
    assert head.endswith("example:")
    assert example.startswith(f"  python -m jgesr_lightning {command} ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--versoin"], "did you mean '--version'"),
        (["table", "--formt", "md", "runs"], "did you mean '--format'"),
        (["table", "--metrik=x", "runs"], "did you mean '--metric'"),
        (["study", "table1_small", "--onyl", "x"], "did you mean '--only'"),
        (["train", "mnist_s01", "--seeed=3"], "did you mean 'seed'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_misspelt_option_names_the_nearest(arguments, hint, capsys):
    assert cli.main(arguments) == 2
    assert hint in one_line(capsys)


def test_the_last_of_two_settings_wins_however_they_are_written(capsys):
    for last in ("seed=5", "--seed=5"):
        assert cli.main(["config", "--seed=3", "mnist_s01", "seed=4", last]) == 0
        assert "\nseed: 5\n" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jgesr_lightning ")


def test_config_prints_what_reads_back_the_same(capsys, tmp_path):
    assert cli.main(["config", "mnist_s02", "aggregator.name=fedprox", "--seed=4"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path) == load_config("mnist_s02", ["aggregator.name=fedprox", "seed=4"])
    assert "mu_prox: 0.01" in path.read_text()


@pytest.mark.parametrize(
    "arguments", [["synthetic"], ["mnist_s01", "data.name=synthetic"], ["data.root=x", "synthetic"]]
)
def test_data_says_what_it_found(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JGESR_DATA", str(tmp_path))
    assert cli.main(["data", *arguments]) == 0
    assert capsys.readouterr().out.startswith("synthetic: ")


@pytest.mark.parametrize(
    "arguments",
    [["./blobs_of_mine.py:blobs"], ["data.name=./blobs_of_mine.py:blobs"], ["blobs_of_mine:blobs", "seed=1"]],
)
def test_data_takes_a_set_of_ones_own_by_its_name(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blobs_of_mine.py").write_text(
        "import torch\nfrom jgesr_lightning.data import make_dataset\n"
        "def blobs(root):\n    return make_dataset('blobs', (torch.eye(30), torch.arange(30) % 3), None, 'abc')\n"
    )
    monkeypatch.delitem(sys.modules, "blobs_of_mine", raising=False)
    assert cli.main(["data", *arguments]) == 0
    assert "blobs: 30 training and 0 test samples of 30 features, 3 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["./sets_of_mine.py:sized"],
            "data.name=sized; sized(root, size) cannot be called for this: missing a required argument",
        ),
        (["clients", "data.root=tables"], "name the column of labels by data.label (columns"),
        (["minst"], "no configuration file minst (did you mean mnist?)"),
        (["mnst"], "no configuration file mnst (did you mean mnist?)"),
        (["mnist_s0"], "no configuration file mnist_s0 (did you mean mnist_s02?)"),
        (["synthetic", "mnist"], "one data set at a time, got synthetic, mnist"),
    ],
)
def test_data_refuses_what_it_cannot_read(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets_of_mine.py").write_text("def sized(root, size):\n    pass\n")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("u,ill\n1,0\n")
    assert cli.main(["data", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_data_says_once_what_it_left_out(capsys, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "tables").mkdir()
    for name in ("train", "test"):
        (tmp_path / "tables" / name).mkdir()
        (tmp_path / "tables" / name / "a.csv").write_text("u,label\n" + "1,0\n2,1\n" * 20)
    (tmp_path / "tables" / "notes.txt").write_text("mine")
    for _ in range(2):  # decoded, then out of the cache
        assert cli.main(["data", "clients", f"data.root={tmp_path / 'tables'}"]) == 0
        said = capsys.readouterr()
        assert (said.err + caplog.text).count("notes.txt") == 0 and said.out.count("notes.txt") == 1
        assert "samples of 1 feature, 2 classes" in said.out


def test_reports_get_their_arguments(monkeypatch):
    seen = []
    for name, status in (("table", 0), ("figures", 2)):
        module = SimpleNamespace(main=lambda arguments, status=status: seen.append(arguments) or status)
        monkeypatch.setitem(sys.modules, f"jgesr_lightning.reporting.{name}", module)
        monkeypatch.setattr(f"jgesr_lightning.reporting.{name}", module, raising=False)
        assert cli.main([name, "runs", "--x"]) == status
    assert seen == 2 * [["runs", "--x"]]


def test_help_and_mistakes_load_neither_torch_nor_lightning():
    code = (
        "import sys\nfrom jgesr_lightning.cli import main\n"
        "assert main(['--help']) == 0 and main(['train', 'mnist_s01', 'local.lrr=1']) == 2\n"
        "sys.exit(bool({'torch', 'lightning', 'wandb'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "jgesr_lightning", "train", "x=1"], capture_output=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith(b"error: ")


def test_output_cut_short_by_its_reader_is_no_traceback():
    command = f"{sys.executable} -m jgesr_lightning --help | true"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in found.stderr


def shell(command, **environment):
    """Run a command line in which ``jgesr`` is the program."""
    command = command.replace("jgesr", f"{sys.executable} -m jgesr_lightning", 1)
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, check=False, env={**os.environ, **environment}, timeout=120
    )


def test_a_character_that_the_output_cannot_take_is_replaced(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path, f"run_{seed}", 0.9, seed=seed)
    found = shell(f"jgesr table {tmp_path}", PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"90.00 ? 0.00 (2)" in found.stdout


def test_a_full_disk_is_one_line():
    found = shell("jgesr config mnist_s01 > /dev/full")
    assert found.returncode == 1
    assert found.stderr.startswith(b"error: ") and found.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("command", "status"), [("config mnist_s01", 0), ("config no_such", 2), ("--help", 0)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_traceback(command, status, closed):
    found = shell(f"jgesr {command} {closed}")
    assert found.returncode == status
    assert b"Traceback" not in found.stderr


@pytest.mark.parametrize("name", ["~no_such_user_here/x", "a" * 253, "a" * 5000])
def test_a_name_that_can_be_no_file_is_a_mistake_in_one_line(name, capsys):
    assert cli.main(["config", name]) == 2
    message = one_line(capsys)
    assert message.startswith("error: no configuration file ") and len(message) < 300


def test_init_copies_what_ships_and_overwrites_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "work"]) == 0
    assert capsys.readouterr().out.endswith("files written to work/configs\n")
    (tmp_path / "work" / "configs" / "mnist_s01.yaml").write_text("seed: 3\n")
    assert cli.main(["init", "work"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("0 files written") and "work/configs/mnist_s01.yaml" in shown
    assert (tmp_path / "work" / "configs" / "mnist_s01.yaml").read_text() == "seed: 3\n"
    monkeypatch.chdir(tmp_path / "work")
    assert cli.main(["config", "mnist_s01"]) == 0
    assert "seed: 3" in capsys.readouterr().out
    assert cli.main(["init", "work", "more"]) == 2 and "init --help" in one_line(capsys)


def test_a_printed_command_can_be_copied(tmp_path, monkeypatch):
    """It names the program as the shell finds it, or where it lies."""
    from jgesr_lightning.arguments import invocation

    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    for name in ("python", "jgesr"):
        (environment / name).write_text("#!/bin/sh\n")
        (environment / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setattr(sys, "argv", ["/x/jgesr_lightning/__main__.py", "train"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert invocation() == ".venv/bin/python -m jgesr_lightning"
    monkeypatch.setattr(sys, "argv", [".venv/bin/jgesr", "train"])
    assert invocation() == ".venv/bin/jgesr"
    monkeypatch.setenv("PATH", str(environment))
    assert invocation() == "jgesr"
    monkeypatch.setattr(sys, "argv", ["/x/jgesr_lightning/__main__.py", "train"])
    assert invocation() == "python -m jgesr_lightning"
    monkeypatch.chdir(environment)  # where the shell would look for a bare name elsewhere
    monkeypatch.setenv("PATH", "/nowhere")
    assert invocation() == f"{environment}/python -m jgesr_lightning"


def test_a_current_folder_that_somebody_removed_is_one_line(tmp_path, monkeypatch, capsys):
    from jgesr_lightning.arguments import invocation

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["config", "mnist_s01"]) == 2
    assert one_line(capsys) == "error: the current folder is gone; go to one that is there\n"
    assert invocation().endswith("-m jgesr_lightning")  # as a run that ends there says it


@pytest.mark.parametrize("arguments", [["--help"], ["table", "--help"], ["config", "mnist_s01"]])
def test_without_docstrings_it_works(arguments, monkeypatch, capsys):
    """As under ``python -OO``."""
    from jgesr_lightning.reporting import table

    for module in (cli, table):
        monkeypatch.setattr(module, "__doc__", None)
    assert cli.main(arguments) == 0
