"""Configurations that come with the package: found by name anywhere, copied to edit."""

from pathlib import Path

import pytest

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.config import SHIPPED, ConfigError, copy_configs, find_config, load_config

ROOT = Path(__file__).parents[2]


def test_the_checkout_has_one_source():
    assert SHIPPED.resolve() == (ROOT / "configs").resolve()


@pytest.mark.parametrize("name", ["mnist_s01", "mnist_s01.yaml", "configs/mnist_s01", "configs/mnist_s01.yaml"])
def test_names_are_found_in_an_empty_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name).resolve() == (ROOT / "configs" / "mnist_s01.yaml").resolve()
    assert load_config(name).name == "mnist_s01"


def test_robust_is_one_setting_for_clients_of_whom_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("robust")
    method = config.aggregator
    assert (config.name, config.clients, config.local.lr, method.name) == ("robust", 20, 0.1, "jgesr")
    assert {"fidelity": "uniform", "mu": 0.001, "groups": 0.65}.items() <= method.settings.items()
    built = build_aggregator(method.name, **method.settings)
    assert built.groups == 0.65 and [term.mu for term in built.client_terms()] == [0.001]


def test_studies_are_looked_for_in_their_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("table1_small", "studies") == SHIPPED / "studies" / "table1_small.yaml"
    with pytest.raises(ConfigError, match=r"did you mean table1_small\?"):
        find_config("table1_smal", "studies")


def test_what_stands_here_comes_before_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mnist_s01.yaml").write_text("seed: 7\n")
    assert load_config("mnist_s01").seed == 7
    (tmp_path / "mnist_s01.yaml").write_text("seed: 8\n")
    assert load_config("mnist_s01").seed == 8
    with pytest.raises(ConfigError, match=r"no configuration file configs/mnist_s02.yaml"):
        load_config("configs/mnist_s02.yaml")  # a folder of that name is there, and does not hold it
    assert load_config("mnist_s02").name == "mnist_s02"


def test_a_missing_name_is_answered_with_the_bare_name_of_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no configuration file mnist_quik \(did you mean mnist_quick\?\)"):
        find_config("mnist_quik")


def test_the_nearest_is_not_looked_for_in_all_that_lies_below(tmp_path, monkeypatch):
    """A slip typed in a home folder, or in ``/``, would else go through all of it, and end at what may not be read."""
    (tmp_path / "runs" / "former").mkdir(parents=True)
    (tmp_path / "runs" / "former" / "longer_nams.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no configuration file longer_name$"):
        find_config("longer_name")
    (tmp_path / "longer_nams.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean longer_nams\.yaml\?"):
        find_config("longer_name")


def test_copies_can_be_edited_and_are_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written, kept = copy_configs("here")
    assert kept == [] and Path("here/configs/base.yaml") in written
    assert Path("here/configs/slurm/array.sbatch") in written and Path("here/configs/studies/table1.yaml") in written
    assert not list(Path("here").rglob("*.png")) and not list(Path("here").rglob("summary.json"))
    mine = Path("here/configs/mnist_s01.yaml")
    mine.write_text("base: base.yaml\nrounds: 2\n")
    again, kept = copy_configs("here")
    assert again == [] and sorted(kept) == sorted(written)
    assert load_config(mine).rounds == 2
    mine.unlink()
    assert copy_configs("here")[0] == [mine]


def test_places_that_take_no_copies(tmp_path):
    with pytest.raises(ConfigError, match="the package's own configurations"):
        copy_configs(ROOT)
    (tmp_path / "configs").write_text("a file")
    with pytest.raises(ValueError, match="configs is a file; name a folder"):
        copy_configs(tmp_path)
    with pytest.raises(ValueError, match="no user 'nobody_of_that_name'"):
        copy_configs("~nobody_of_that_name/x")
