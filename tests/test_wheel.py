"""The package as others install it: built into a wheel, used far from this checkout."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USE = """
import sys
from jgesr_lightning import cli
assert "unpacked" in cli.__file__, cli.__file__
tiny = ["data.name=synthetic", "data.fraction=0.1", "clients=4", "rounds=1", "local.epochs=1", "aggregator.name=fedavg"]
quiet = ["runtime.devices=1", "runtime.accelerator=cpu", "logging.wandb=false", "local.batch_size=128"]
assert cli.main(["config", "mnist_s01"]) == 0
assert cli.main(["config", "configs/mnist_s02.yaml"]) == 0
assert cli.main(["study", "table1_small", "--list"]) == 0
assert cli.main(["train", "mnist_s01", *tiny, *quiet]) == 0
assert cli.main(["init"]) == 0
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel of a copy of this checkout; the checkout itself stays as it is."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("out")
    for name in ("jgesr_lightning", "configs"):
        left_out = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_configuration_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {str(file.relative_to(ROOT)) for file in (ROOT / "jgesr_lightning").rglob("*.py")}
    configs = [file for pattern in ("*.yaml", "*.sbatch") for file in (ROOT / "configs").rglob(pattern)]
    expected |= {f"jgesr_lightning/{file.relative_to(ROOT)}" for file in configs if "results" not in file.parts}
    extra = {"jgesr_lightning/py.typed", "jgesr_lightning/reporting/templates/page.html.j2"}
    assert expected | extra <= names
    assert {Path(name).suffix for name in names - expected - extra} <= {".j2", ".html", ".css", ".js"}  # templates


def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    folder = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    told = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
    assert told["Version"] == "0.3.0" and told["License-Expression"] == "Apache-2.0"
    assert {"Typing :: Typed"} < set(told.get_all("Classifier"))
    assert told.get_all("Project-URL") and told["Author"] and told["Keywords"]
    assert "jgesr = jgesr_lightning.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()


def test_shipped_names_work_in_an_empty_folder(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path / "empty",
        env={"PYTHONPATH": str(tmp_path / "unpacked"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "name: mnist_s01" in done.stdout and "name: mnist_s02" in done.stdout
    assert "mnist_s0.1_jgesr_seed0: not begun" in done.stdout
    assert (tmp_path / "empty" / "runs" / "mnist_s01" / "summary.json").is_file()
    assert (tmp_path / "empty" / "configs" / "slurm" / "train.sbatch").is_file()
