import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TARGETS = {"setup", "train", "test", "bench", "lint", "table", "figures", "data", "clean"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path):
    """A checkout without an environment, and a `python3` that stands for a real one and notes its arguments."""
    top = tmp_path / "top" / "checkout"
    (top / "configs").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "configs/mnist_s01.yaml"):
        shutil.copy(ROOT / name, top / name)
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/bash\n"
        f'echo "JGESR_DATA=${{JGESR_DATA:-}} $*" >> {tmp_path}/calls\n'
        '[ "$1" = --version ] && echo Python 3.11.0\n'
        '[ "$1 $2" = "-m venv" ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python\n'
        '[ "$1 $2" = "-m pip" ] && sleep "${PIP_SECONDS:-0}" && exit "${PIP_STATUS:-0}"\n'
        "exit 0\n"
    )
    fake.chmod(0o755)
    return top


def start(checkout, *arguments, **environment):
    ours = ("MAKE", "MFLAGS", "JGESR", "ARGS", "CONFIG", "DATASET", "RUNS", "PYTHON", "SBATCH")  # of an outer make
    base = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    path = f"{checkout.parent.parent}/bin:{base['PATH']}"
    return subprocess.Popen(
        ["make", *arguments],
        cwd=checkout,
        env=base | {"PATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def make(checkout, *arguments, **environment):
    return end(start(checkout, *arguments, **environment))


def calls(checkout):
    return (checkout.parent.parent / "calls").read_text().splitlines()


def installs(checkout):
    return [call for call in calls(checkout) if "pip install" in call]


def test_help_is_the_default_and_lists_the_targets(checkout):
    shown = make(checkout).stdout
    assert shown == make(checkout, "help").stdout
    assert set(re.findall(r"^  ([a-z-]+) ", shown, re.MULTILINE)) >= TARGETS


def test_train_sets_up_once_with_what_running_needs(checkout):
    for _ in range(2):
        done = make(checkout, "train", "CONFIG=mnist_s01", "ARGS=seed=3 aggregator.name=fedavg")
        assert done.returncode == 0, done.stderr
    assert len(installs(checkout)) == 1
    assert installs(checkout)[0].endswith("--editable .")
    assert calls(checkout)[-1].endswith("-m jgesr_lightning train mnist_s01 seed=3 aggregator.name=fedavg")


def test_test_installs_the_extras_and_serves_train_as_well(checkout):
    assert make(checkout, "test", "ARGS=-k x").returncode == 0
    assert re.search("-m pytest .*-k x$", calls(checkout)[-1])
    assert make(checkout, "train", "CONFIG=mnist_s01").returncode == 0
    assert [call.split()[-1] for call in installs(checkout)] == [".[test]"]


def test_docs_installs_its_own_extras_and_builds_strictly(checkout):
    assert make(checkout, "docs").returncode == 0
    assert [call.split()[-1] for call in installs(checkout)] == [".[docs]"]
    assert "-m mkdocs build --strict" in calls(checkout)[-1]


def test_a_changed_pyproject_updates_the_environment(checkout):
    make(checkout, "setup")
    stamp = (checkout / ".venv" / ".ready-to-test").stat().st_mtime
    os.utime(checkout / "pyproject.toml", (stamp + 5, stamp + 5))
    make(checkout, "setup")
    assert len(installs(checkout)) == 2
    assert sum("-m venv" in call for call in calls(checkout)) == 1


def test_a_set_up_that_failed_is_done_again(checkout):
    assert make(checkout, "train", "CONFIG=mnist_s01", PIP_STATUS="1").returncode != 0
    assert not any("jgesr_lightning train" in call for call in calls(checkout))
    assert make(checkout, "train", "CONFIG=mnist_s01").returncode == 0
    assert len(installs(checkout)) == 2


def begun(checkout):
    """Wait until something is being installed."""
    deadline = time.monotonic() + 30
    while not ((checkout.parent.parent / "calls").exists() and installs(checkout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
@pytest.mark.parametrize(("first", "extras"), [(["train", "CONFIG=mnist_s01"], "."), (["test"], ".[test]")])
def test_who_comes_while_another_installs_waits_and_uses_it(checkout, first, extras):
    one = start(checkout, *first, PIP_SECONDS="1")
    begun(checkout)
    two = make(checkout, "train", "CONFIG=mnist_s01")
    assert (two.returncode, end(one).returncode) == (0, 0), two.stderr
    assert "Waiting for another make" in two.stdout
    assert [call.split()[-1] for call in installs(checkout)] == [extras]
    assert any(call.endswith("jgesr_lightning train mnist_s01") for call in calls(checkout)[-2:])


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_who_waited_for_a_set_up_that_failed_does_it(checkout):
    one = start(checkout, "train", "CONFIG=mnist_s01", PIP_SECONDS="1", PIP_STATUS="1")
    begun(checkout)
    two = make(checkout, "train", "CONFIG=mnist_s01")
    assert (two.returncode, end(one).returncode) == (0, 2), two.stderr
    assert len(installs(checkout)) == 2


@pytest.mark.parametrize("flock", [None, "#!/bin/sh\nexit 65\n"], ids=["missing", "without effect"])
def test_it_sets_up_without_locks_where_there_are_none(checkout, flock):
    tools = checkout.parent.parent / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "make", "rm", "touch", "sleep", "mkdir", "cp"):
        (tools / name).symlink_to(shutil.which(name))
    if flock:
        (tools / "flock").write_text(flock)
        (tools / "flock").chmod(0o755)
    path = f"{checkout.parent.parent}/bin:{tools}"
    for _ in range(2):
        done = make(checkout, "train", "CONFIG=mnist_s01", PATH=path)
        assert done.returncode == 0, done.stderr
        assert "Waiting" not in done.stdout
    assert len(installs(checkout)) == 1


@pytest.mark.parametrize("arguments", [["train"], ["train", "CONFIG=mnist_s9"], ["slurm"]])
def test_without_a_configuration_the_known_ones_are_listed_before_any_set_up(checkout, arguments):
    done = make(checkout, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "  mnist_s01\n" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_fitting_python_is_one_clear_line(checkout):
    done = make(checkout, "train", "CONFIG=mnist_s01", "PYTHON=/bin/false")
    assert done.returncode == 2
    assert "error: Python 3.11 or newer" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_data_folder_shared_beside_the_checkout_is_used(checkout):
    shared = checkout.parent / "shared" / "data"
    make(checkout, "data")
    assert "JGESR_DATA= " in calls(checkout)[-1]
    shared.mkdir(parents=True)
    make(checkout, "data", "DATASET=cifar10")
    assert calls(checkout)[-1] == f"JGESR_DATA={shared} -m jgesr_lightning data cifar10"
    make(checkout, "data", JGESR_DATA="/mine")
    assert "JGESR_DATA=/mine " in calls(checkout)[-1]
    (checkout / "data").mkdir()  # which may hold another set: the shared folder still counts
    make(checkout, "data")
    assert f"JGESR_DATA={shared} " in calls(checkout)[-1]


def test_runs_may_be_one_folder_with_a_space_or_several(checkout):
    def folders(given):
        assert make(checkout, "table", f"RUNS={given}", "ARGS=--metric x").returncode == 0
        arguments = (checkout.parent.parent / "arguments").read_text().splitlines()
        return arguments[arguments.index("table") + 1 : arguments.index("--metric")]

    fake = checkout / ".venv" / "bin" / "python"
    make(checkout, "setup")
    fake.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {checkout.parent.parent}/arguments\n')
    (checkout / "a b").mkdir()
    assert folders("a b") == ["a b"]
    assert folders("a c") == ["a", "c"]
    assert folders("a") == ["a"]
    assert make(checkout, "table", "ARGS=--metric x").returncode == 0
    assert "\nruns\n" in (checkout.parent.parent / "arguments").read_text()
    assert folders("x; touch evil") == ["x;", "touch", "evil"]
    assert not (checkout / "evil").exists()


def test_reproduce_reports_where_the_study_says_that_its_runs_are(checkout):
    fake = checkout / ".venv" / "bin" / "python"
    make(checkout, "setup")
    fake.write_text(
        f'#!/bin/bash\necho "$*" >> {checkout.parent.parent}/calls\n'
        '[ "${@: -1}" = --folder ] && echo "far off/mine"\nexit 0\n'
    )
    done = make(checkout, "reproduce", "STUDY=some where/mine.yaml", 'ARGS=output_dir="far off" rounds=2')
    assert done.returncode == 0, done.stderr
    assert [call.partition("jgesr_lightning ")[2] for call in calls(checkout)[-5:]] == [
        "study some where/mine.yaml output_dir=far off rounds=2",
        "study some where/mine.yaml output_dir=far off rounds=2 --folder",
        "table far off/mine --format all --out far off/mine/tables",
        "figures far off/mine",
        "report far off/mine",
    ]


def test_clean_keeps_runs_data_and_environment(checkout):
    kept = ["runs", "data", ".venv"]
    for name in [*kept, "build", ".pytest_cache", "jgesr_lightning/__pycache__", "tests/x/__pycache__"]:
        (checkout / name).mkdir(parents=True)
    assert make(checkout, "clean").returncode == 0
    assert all((checkout / name).is_dir() for name in kept)
    assert not list(checkout.rglob("__pycache__"))
    assert not (checkout / "build").exists()
    make(checkout, "clean-all")
    assert [(checkout / name).exists() for name in kept] == [True, True, False]
