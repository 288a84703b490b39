"""Settings of methods, ours and others', typed from their constructors."""

import subprocess
import sys
from pathlib import Path

import pytest

from jgesr_lightning.config import ConfigError, as_argument, in_full, load_config, read_yaml, to_yaml
from jgesr_lightning.config.methods import settings_model

ROOT = Path(__file__).parents[2]
OUTSIDE = ROOT / "tests" / "outside"
KRUM = "robust_methods.krum:Krum"
MEAN = "robust_methods:TrimmedMean"
MINE = """
from typing import Annotated, Literal
from pydantic import Field
from jgesr_lightning.aggregators.fedavg import FedAvg

class Mine(FedAvg):
    min_clients = 4
    def __init__(self, kind: Literal["soft", "hard"] = "soft", rate: Annotated[float, Field(gt=0)] = 0.5,
                 steps: int | None = None, words: tuple[str, ...] = (), loose=1, copy: bool = False):
        super().__init__()
        if steps == 13:
            raise RuntimeError("thirteen brings bad luck")
        self.kind, self.rate, self.steps, self.words, self.loose, self.copy = kind, rate, steps, words, loose, copy

def make(rate: float = 0.5):
    return Mine(rate=rate)

def wrong(): return 3
def odd(thing=object()): return Mine()
def named(name="x"): return Mine()
def hidden(_x=1): return Mine()
def ending(): raise SystemExit(3)

class NoMethod: pass
class Bare(FedAvg):
    def __init__(self): self.x = 1
class Odd(FedAvg): own = "cleen"
class Where(FedAvg): start = "here"
class Terms(FedAvg):
    def client_terms(self, proximal_mu=None): return 0.1
"""


@pytest.fixture(autouse=True)
def _outside(monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(*overrides, path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_of_an_outside_class_are_typed_from_its_signature():
    config = load_config(None, [f"aggregator.name={MEAN}", "aggregator.trim=1e-1"])
    assert config.aggregator.settings == {"trim": 0.1}
    assert load_config(None, [f"aggregator.name={MEAN}"]).aggregator.settings == {"trim": 0.2}
    krum = load_config(None, [f"aggregator.name={KRUM}", "aggregator.byzantine=010", "aggregator.scale=none"])
    assert krum.aggregator.settings == {"byzantine": 10, "scale": None}


@pytest.mark.parametrize(
    ("overrides", "about"),
    [
        ([f"aggregator.name={MEAN}", "aggregator.trim=x"], "aggregator.trim is 'x'; it must be a number"),
        ([f"aggregator.name={MEAN}", "aggregator.trim=0.7"], "aggregator.trim is 0.7; it must be at most 0.49"),
        ([f"aggregator.name={MEAN}", "aggregator.trin=0.1"], "no setting of TrimmedMean (did you mean 'trim'?)"),
        ([f"aggregator.name={MEAN}", "clients=2"], "clients is 2; TrimmedMean needs at least 3 clients"),
        ([f"aggregator.name={KRUM}"], "aggregator.byzantine is missing"),
        ([f"aggregator.name={KRUM}", "aggregator.byzantine=-1"], "aggregator.byzantine is -1; it must be at least 0"),
        ([f"aggregator.name={KRUM}", "aggregator.byzantine=1.5"], "aggregator.byzantine is '1.5'; it must be a whole"),
        (["aggregator.name=robust_methods:Krumm"], "holds no Krumm (did you mean 'Krum'?)"),
        (["aggregator.name=./mine.py:Mine", "aggregator.kind=hrad"], "aggregator.kind is 'hrad' (did you mean 'hard'"),
        (["aggregator.name=./mine.py:Mine", "aggregator.rate=0"], "aggregator.rate is 0.0; it must be"),
        (["aggregator.name=./mine.py:Mine", "aggregator.steps=x"], "it must be a whole number or null"),
        (["aggregator.name=./mine.py:Mine", "aggregator.steps=13"], "aggregator: thirteen brings bad luck"),
        (["aggregator.name=./mine.py:Mine", "clients=3"], "clients is 3; Mine needs at least 4"),
        (["aggregator.name=./mine.py:NoMethod"], "no subclass of jgesr_lightning.aggregators.base.Aggregator"),
        (["aggregator.name=./mine.py:wrong"], "which gave a int; it must give an Aggregator"),
        (["aggregator.name=./mine.py:Bare"], "Bare.__init__ must call super().__init__()"),
        (["aggregator.name=./mine.py:Odd"], "Odd.own is 'cleen' (did you mean 'clean'?); known: received, clean"),
        (["aggregator.name=./mine.py:Where"], "Where.start is 'here'; known: cloud, own"),
        (["aggregator.name=./mine.py:Terms"], "must return a tuple of functions of (x, sent); it returned a float"),
        (["aggregator.name=./mine.py:odd"], "the default of its setting thing cannot stand in a file"),
        (["aggregator.name=./mine.py:named"], "its setting name must be called otherwise"),
        (["aggregator.name=./mine.py:hidden"], "its setting _x must be called otherwise"),
        (["aggregator.name=./mine.py:ending"], "aggregator: 3"),
        (["data.name=./mine.py:nothing"], "data.name is "),
        (["model.name=./mine.py:nothing"], "model.name is "),
    ],
)
def test_mistakes_have_the_messages_of_our_own(mine, overrides, about):
    assert about in error_of(*overrides)


def test_settings_of_every_kind(mine):
    arguments = ["aggregator.words=[a,1]", "aggregator.loose=1e-2", "aggregator.copy=yes", "aggregator.steps=3"]
    config = load_config(None, ["aggregator.name=./mine.py:Mine", *arguments])
    assert config.aggregator.settings == {
        "kind": "soft", "rate": 0.5, "steps": 3, "words": ("a", "1"), "loose": 0.01, "copy": True,
    }  # fmt: skip


def test_a_function_may_make_the_method(mine):
    assert load_config(None, ["aggregator.name=./mine.py:make", "aggregator.rate=2"]).aggregator.settings == {"rate": 2}


def test_a_file_is_found_beside_the_configuration_that_names_it(mine, monkeypatch):
    (mine / "sub").mkdir()
    (mine / "base.yaml").write_text("aggregator: {name: ./mine.py:Mine, rate: 3}\n")
    (mine / "sub" / "run.yaml").write_text("base: ../base.yaml\nseed: 2\n")
    monkeypatch.chdir("/")
    config = load_config(mine / "sub" / "run.yaml", ["aggregator.steps=2"])
    assert config.aggregator.name == f"{mine}/mine.py:Mine"
    assert (config.aggregator.settings["rate"], config.aggregator.settings["steps"]) == (3, 2)
    (mine / "sub" / "again.yaml").write_text(to_yaml(config))  # as in the run's folder
    assert load_config(mine / "sub" / "again.yaml") == config
    message = error_of("aggregator.name=./mine.py:Mine", path=mine / "sub" / "run.yaml")
    assert message == "aggregator.name is '/mine.py:Mine'; there is no file /mine.py"


def test_a_file_named_in_a_study_is_taken_from_beside_it(mine):
    (mine / "study.yaml").write_text("settings: {aggregator.name: ./mine.py:Mine}\n")
    from tests.config.test_written import Outer

    settings = read_yaml(mine / "study.yaml", Outer).values.settings
    assert as_argument(in_full(settings)["aggregator.name"]) == f"{mine}/mine.py:Mine"
    assert load_config(None, settings=settings).aggregator.name == f"{mine}/mine.py:Mine"


def test_mistakes_of_outside_names_in_files_are_located(mine):
    (mine / "run.yaml").write_text("seed: 1\naggregator:\n  name: ./mine.py:Mien\n")
    assert f"({mine}/run.yaml, line 3)" in error_of(path=mine / "run.yaml")
    (mine / "run.yaml").write_text("seed: 1\ndata:\n  name: ./mine.py:Mien\n")
    assert f"({mine}/run.yaml, line 3)" in error_of(path=mine / "run.yaml")


def test_our_methods_and_others_share_settings_of_one_meaning(mine, caplog):
    config = load_config(None, ["aggregator.alpha=0.3"])
    assert config.aggregator.settings["alpha"] == 0.3
    (mine / "run.yaml").write_text("aggregator: {name: jgesr, alpha: 0.3}\n")
    assert load_config(mine / "run.yaml", ["aggregator.name=./mine.py:Mine"]).aggregator.settings["rate"] == 0.5
    assert "settings of jgesr" in caplog.text and "alpha=0.3" in caplog.text


def test_the_model_of_a_method_is_built_from_its_constructor():
    model = settings_model("jgesr")
    assert model.model_fields["alpha"].annotation is float and model.model_fields["alpha"].default == 0.05
    with pytest.raises(ConfigError, match=r"aggregator.alpha is 'x'; it must be a number"):
        model(alpha="x")


def test_the_configurations_that_ship_need_no_torch():
    code = (
        "import sys; from jgesr_lightning import cli\n"
        "status = cli.main(['config', 'mnist_s01', 'aggregator.name=two_step', 'seed=3', 'data.name=cifar10'])\n"
        "print(status, *(name for name in ('torch', 'lightning', 'numpy') if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "0\n"
