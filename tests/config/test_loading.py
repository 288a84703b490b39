import ast
import itertools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jgesr_lightning.aggregators import aggregator_names, aggregator_settings
from jgesr_lightning.config import (
    KEYS,
    SECTIONS,
    Config,
    ConfigError,
    completed,
    find_config,
    load_config,
    schema,
    to_dict,
    to_yaml,
)
from jgesr_lightning.identity import condition

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "base.yaml"
SHIPPED = [file for file in sorted((ROOT / "configs").rglob("*.yaml")) if not {"sweeps", "studies"} & set(file.parts)]


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="run.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


def error_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flat(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


# what ships


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid_and_named_after_itself(path):
    assert load_config(path).name == path.stem


def test_base_file_names_every_key_with_its_default():
    assert set(flat(yaml.safe_load(BASE.read_text()))) == set(KEYS)
    assert load_config(BASE) == Config(name="base")


def test_every_line_of_the_base_file_that_leaves_something_open_has_a_comment():
    bare = [line for line in BASE.read_text().splitlines() if line.endswith((": null", ": auto"))]
    assert bare == []


def test_every_key_is_documented():
    for cls in ast.parse(Path(schema.__file__).read_text()).body:
        body = getattr(cls, "body", []) if isinstance(cls, ast.ClassDef) else []
        for item, after in itertools.pairwise([*body, ast.Pass()]):
            if isinstance(item, ast.AnnAssign) and item.target.id not in SECTIONS:
                assert isinstance(after, ast.Expr) and len(after.value.value) > 6, f"{cls.name}.{item.target.id}"


def test_the_experiment_of_the_paper():
    for data in ("mnist", "cifar10"):
        for noise in (0.1, 0.2):
            config = load_config(ROOT / "configs" / f"{data}_s0{round(10 * noise)}.yaml")
            assert (config.data.name, config.channel.noise) == (data, noise)
            assert (config.clients, config.rounds, config.local.epochs, config.local.lr) == (20, 30, 5, 0.01)
            assert (config.local.momentum, config.data.kappa, config.data.test_share) == (0, 0.05, 0.25)
            assert (config.aggregator.name, config.channel.missing_rate) == ("jgesr", 0)


# overrides


def test_dashes_and_order_make_no_difference():
    expected = load_config(BASE, ["local.lr=0.05", "seed=3"])
    assert (expected.local.lr, expected.seed) == (0.05, 3)
    assert load_config(BASE, ["--seed=3", "--local.lr=0.05"]) == expected
    assert expected.local == Config().local.replace(lr=0.05)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("local.lrr=0.05", "local.lr"),
        ("--local.lrr=0.05", "local.lr"),
        ("lr=0.05", "local.lr"),
        ("data.lr=0.05", "local.lr"),
        ("noise=0.2", "channel.noise"),
        ("round=5", "rounds"),
        ("aggregator.alhpa=1", "alpha"),
        ("aggregator.name=fedagv", "fedavg"),
        ("data.name=minst", "mnist"),
        ("model.name=lenett", "lenet"),
        ("engine=stack", "stacked"),
        ("logging.wandb_mode=off", "offline"),
        ("runtime.precision=32-tru", "32-true"),
        ("nonfinite=drops", "drop"),
        ("metric=received", "accuracy/received"),
        ("metric=accuracy/recieved", "accuracy/received"),
        ("data.name=MNIST", "mnist"),
        ("data.name=cifar", "cifar10"),
        ("aggregator.name=proposed", "jgesr"),
        ("learning_rate=0.1", "local.lr"),
        ("local.learning_rate=0.1", "local.lr"),
        ("model.learning_rate=0.1", "local.lr"),
        ("Learning_Rate=0.1", "local.lr"),
        ("dataset=mnist", "data.name"),
        ("data.dataset=mnist", "data.name"),
        ("method=fedavg", "aggregator.name"),
        ("num_clients=3", "clients"),
        ("gpus=2", "runtime.devices"),
        ("dirichlet=1", "data.kappa"),
        ("data.alpha=1", "data.kappa"),
        ("client_drop_rate=0.5", "participation"),
        ("alpha=1", "aggregator.alpha"),
        ("variant=paper", "aggregator.variant"),
        ("packet_loss=0.1", "channel.missing_rate"),
        ("downlink.packet_loss=0.1", "downlink.missing_rate"),
    ],
)
def test_misspelt_keys_and_words_stop_with_the_nearest(override, named):
    message = error_of(BASE, override)
    assert f"did you mean {named!r}" in message


def test_unknown_key_far_from_all_lists_what_there_is():
    assert "channel.*" in error_of(BASE, "zzzzz=1")


@pytest.mark.parametrize("override", ["local=5", "local=null", "local={lr: 1}", "aggregator=fedavg", "seeds=3"])
def test_a_value_for_a_section_is_refused(override):
    message = error_of(BASE, override)
    assert "is a section" in message
    assert f"{override.partition('=')[0]}." in message


@pytest.mark.parametrize("override", ["seed", "--seed", "--local.lr", "=3", "--=3", ""])
def test_an_argument_that_is_no_setting_is_refused(override):
    assert "key=value" in error_of(BASE, override)


@pytest.mark.parametrize("override", ["aggregator.=1", "aggregator.a.b=1", "local.lr.x=1", ".seed=1", "base=x.yaml"])
def test_malformed_keys_are_refused(override):
    error_of(BASE, override)


def test_the_last_of_two_overrides_wins():
    assert load_config(BASE, ["seed=3", "rounds=2", "seed=4"]).seed == 4


@pytest.mark.parametrize("argument", ["_wandb={'a': 1}", "--_wandb={}", "_wandb", "_wandb.x=1"])
def test_what_sweep_agents_add_is_passed_over(argument):
    assert load_config(BASE, [argument, "seed=3"]) == load_config(BASE, ["seed=3"])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=77950e8", "name", "77950e8"),
        ("name=1e5", "name", "1e5"),
        ("name=true", "name", "true"),
        ("name=007", "name", "007"),
        ("name=a=b", "name", "a=b"),
        ("name=null", "name", "base"),
        ('output_dir="null"', "output_dir", "null"),
        ("resume=null", "resume", None),
        ("resume=None", "resume", None),
        ("resume=auto", "resume", "auto"),
        ("local.lr=1e-3", "local.lr", 0.001),
        ("local.lr=1", "local.lr", 1.0),
        ("local.lr=.5", "local.lr", 0.5),
        ("local.proximal_mu=none", "local.proximal_mu", None),
        ("local.proximal_mu=0", "local.proximal_mu", 0.0),
        ("seeds.channel=7", "seeds.channel", 7),
        ("deterministic=False", "deterministic", False),
        ("deterministic=0", "deterministic", False),
        ("deterministic=yes", "deterministic", True),
        ("logging.tags=[a,b c]", "logging.tags", ("a", "b c")),
        ("logging.tags=[]", "logging.tags", ()),
        ('logging.tags=[1e5,"null"]', "logging.tags", ("1e5", "null")),
        ("runtime.devices=2", "runtime.devices", 2),
        ("runtime.devices=auto", "runtime.devices", "auto"),
    ],
)
def test_values_are_read_as_the_type_of_their_key(override, key, value):
    found = load_config(BASE, [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "override",
    [
        "rounds=1.5",
        "rounds=1e3",
        "rounds=ten",
        "rounds=",
        "rounds=null",
        "rounds=true",
        "rounds=0",
        "rounds=-1",
        "seed=-1",
        "clients=0",
        "clients=1",
        "participation=0",
        "participation=1.01",
        "local.lr=fast",
        "local.lr=nan",
        "local.lr=inf",
        "local.lr=0",
        "local.lr=1e+39",
        "local.lr=1e-39",
        "aggregator.mu=1e-308",
        "local.lr=0x1",
        "local.epochs=0",
        "local.batch_size=0",
        "local.momentum=1",
        "local.proximal_mu=-1",
        "channel.noise=-0.1",
        "channel.missing_rate=1",
        "channel.missing_rate=-0.1",
        "data.kappa=0",
        "data.fraction=0",
        "data.fraction=1.5",
        "data.test_share=0",
        "data.test_share=1",
        "data.min_samples=1",
        "data.name=null",
        "deterministic=2",
        "deterministic=maybe",
        "evaluation.every=0",
        "checkpoint.every=0",
        "logging.graph_every=0",
        "logging.tags=a",
        "logging.project=a/b",
        "runtime.devices=0",
        "runtime.devices=some",
        "runtime.num_nodes=0",
        "runtime.accelerator=abacus",
        "name=a/b",
        "name=..",
        "name= x",
        pytest.param(f"name={'n' * 201}", id="name of 201 letters"),
        pytest.param(f"name={'ü' * 121}", id="name of 242 bytes"),
        "output_dir=",
        "output_dir=null",
        "output_dir=~",
        "data.label=None",
        "output_dir=~nobody_of_that_name/runs",
        "resume=~nobody_of_that_name/runs/x",
        "data.root=~nobody_of_that_name/data",
        "metric=loss",
        "aggregator.alpha=much",
        "aggregator.alpha=-1",
        "aggregator.name=null",
    ],
)
def test_values_that_cannot_be_used_stop_with_key_and_value(override):
    key, _, value = override.partition("=")
    message = error_of(BASE, override)
    assert message.startswith(f"{key} ")
    assert value in message


def test_a_text_that_says_nothing_is_refused_in_a_list_too(write):
    line = "logging.tags is ['a', 'null']; it must be text that is not blank; null, none and ~ are text in quotes alone"
    assert error_of(BASE, "logging.tags=[a,null]") == line
    assert error_of(write("logging: {tags: [a, null]}\n")).startswith(line)
    assert load_config(write("output_dir: 'null'\n")).output_dir == "null"


@pytest.mark.parametrize("key", ["name", "output_dir", "resume", "data.root", "base"])
@pytest.mark.parametrize("text", ["\\0", "a\\0b", "a\\eb", "a\\x7f"])
def test_a_control_character_is_refused_where_a_place_is_named(write, key, text):
    message = error_of(write(f'{key}: "{text}"\n'))
    assert "control character" in message and "\\x" in message and message.isprintable()


@pytest.mark.parametrize("root", ["a", "./a", "a/", "b/../a", "~/a", "{}/a"])
def test_the_root_of_data_of_ones_own_is_one_path_however_it_is_written(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path, root = tmp_path / "a", root.format(tmp_path)
    found = load_config(None, ["data.name=tensors", f"data.root={root}"])
    assert found.data.root == str(path)
    assert load_config(None, ["data.name=mnist", f"data.root={root}"]).data.root == root  # wherever it lies
    former = to_dict(found) | {"data": {"name": "tensors", "root": root}}  # as runs of before have it
    assert condition(former)["data.root"] == str(path)
    monkeypatch.chdir("/")
    assert load_config(None, []).replace(data=found.data) == found
    assert condition({"data": {"name": "tensors", "root": "~nobody_of_that_name/a"}})


# files


def test_later_files_win_and_a_shared_base_is_applied_once(write):
    write("rounds: 7\nclients: 5\nlocal: {lr: 0.5}\n", "base.yaml")
    write("base: base.yaml\nrounds: 8\n", "one.yaml")
    write("base: base.yaml\nclients: 6\n", "two.yaml")
    path = write("base: [one.yaml, two.yaml]\nseed: 9\nlocal.epochs: 2\n")
    config = load_config(path, ["channel.noise=0.3"])
    assert (config.name, config.rounds, config.clients, config.seed) == ("run", 8, 6, 9)
    assert (config.local.lr, config.local.epochs, config.channel.noise) == (0.5, 2, 0.3)


def test_bases_are_relative_to_the_file_that_names_them(write, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write("rounds: 7\n", "top.yaml")
    path = write("base: ../top.yaml\n", "sub/run.yaml")
    monkeypatch.chdir("/")
    assert load_config(path).rounds == 7


def test_a_bare_base_that_is_not_beside_the_file_is_one_that_is_shipped(write):
    assert load_config(write("base: mnist_quick\nseed: 3\n")) == load_config("mnist_quick", ["name=run", "seed=3"])
    assert error_of(write("base: mnist_quik\n"), "seed=3").startswith(
        f"{write('base: mnist_quik')}, line 1: no base file"
    )
    write("rounds: 7\n", "mnist_quick")
    assert load_config(write("base: mnist_quick\n")).rounds == 7  # what lies beside it comes first


def test_a_name_given_in_a_base_reaches_the_files_built_on_it(write):
    write("name: shared\n", "base.yaml")
    assert load_config(write("base: base.yaml\n")).name == "shared"
    assert load_config(write("base: base.yaml\nname: null\n")).name == "run"


def test_bases_that_lead_in_a_circle_are_an_error(write):
    write("base: run.yaml\n", "other.yaml")
    assert "other.yaml, line 1" in error_of(write("base: other.yaml\n"))
    assert "run.yaml" in error_of(write("base: run.yaml\n"))


@pytest.mark.parametrize(
    ("text", "line", "about"),
    [
        ("seed: 1\nlocal:\n  lrr: 3\n", 3, "did you mean 'local.lr'"),
        ("seed: 1\nlocal: 5\n", 2, "is a section"),
        ("seed: 1\nlocal: [1]\n", 2, "is a section"),
        ("seed: 1\nrounds: 3\nseed: 2\n", 3, "seed stands twice (first in line 1)"),
        ("local: {lr: 1}\nlocal.lr: 2\n", 2, "local.lr stands twice"),
        ("seed: [1, 2\nrounds: 3\n", 2, "not valid YAML"),
        ("seed: 1\n\trounds: 3\n", 2, "not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", 2, "not valid YAML"),
        ("seed: 1\nrounds: lots\n", 2, "rounds is 'lots'; it must be a whole number"),
        ("seed: 1\nrounds: 2.5\n", 2, "rounds is '2.5'"),
        ("seed: 1\nrounds: {a: 1}\n", 2, "rounds holds keys"),
        ("seed: 1\nrounds: 0\n", 2, "rounds is 0"),
        ("data:\n  fraction: 2\n", 2, "data.fraction is 2.0"),
        ("- seed\n", 1, "key: value"),
        ("just words\n", 1, "key: value"),
        ("[1]: 2\n", 1, "plain words"),
        ("seed: 1\naggregator: {name: jgesr, alhpa: 1}\n", 2, "did you mean 'alpha'"),
        ("aggregator:\n  alpha: x\n", 2, "aggregator.alpha is 'x'"),
        ("aggregator:\n  name: fedagv\n", 2, "did you mean 'fedavg'"),
        ("seed: 1\nbase: nowhere.yaml\n", 2, "no base file"),
        ("seed: 1\nbase: ~nobody-here/a.yaml\n", 2, "base ~nobody-here/a.yaml names no place"),
    ],
)
def test_mistakes_in_files_are_named_with_file_and_line(write, text, line, about):
    path = write(text)
    message = error_of(path)
    assert about in message
    assert f"{path}, line {line}" in message


def test_a_study_is_named_as_one(write):
    path = write("base: base\nmethods: {fedavg: {}, jgesr: {alpha: 0.1}}\ndata: [mnist]\n")
    assert error_of(path).endswith(
        f"{path} is a study, not one run; it is run by: python -m jgesr_lightning study {path}"
    )


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"name: \x00"])
def test_files_that_are_not_text_are_named(tmp_path, content):
    (tmp_path / "run.yaml").write_bytes(content)
    assert str(tmp_path / "run.yaml") in error_of(tmp_path / "run.yaml")


def test_empty_files_and_sections_mean_defaults(write):
    assert load_config(write("")) == Config()
    assert load_config(write("# nothing\nlocal:\nseed: 0\n")) == Config()
    assert load_config(None, ["seed=2"]) == Config(seed=2)


def test_scalars_in_files_are_read_as_the_type_of_their_key(write):
    config = load_config(
        write('name: 77950e8\nresume: "null"\nlocal: {lr: 1e-3, proximal_mu: ~}\nlogging: {wandb: off}\n')
    )
    assert (config.name, config.resume, config.local.lr, config.local.proximal_mu) == ("77950e8", "null", 0.001, None)
    assert config.logging.wandb is False


def test_environment_and_other_keys_are_filled_in(write, monkeypatch):
    monkeypatch.setenv("SOME_SEED", "12")
    path = write(
        "seed: ${oc.env:SOME_SEED}\nname: try_${seed}_${channel.noise}\nseeds: {channel: '${seed}'}\n"
        "aggregator: {alpha: '${local.lr}'}\nlogging: {tags: ['s${seed}', '${data.name}']}\n"
    )
    config = load_config(path, ["channel.noise=0.3", "local.lr=0.5"])
    assert (config.name, config.seed, config.seeds.channel) == ("try_12_0.3", 12, 12)
    assert (config.aggregator.settings["alpha"], config.logging.tags) == (0.5, ("s12", "mnist"))


@pytest.mark.parametrize(
    "value", ["${oc.env:NO_SUCH_VARIABLE}", "${nothing.here}", "${rounds", "${rounds}", "${local}", "${local.lr}"]
)
def test_references_that_lead_nowhere_or_to_a_wrong_type_are_named(write, value, monkeypatch):
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    assert "rounds" in error_of(write(f"rounds: '{value}'\n"))


# finding files


def test_bare_names_stand_for_files_in_configs(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    expected = load_config("configs/mnist_s01.yaml")
    for name in ("mnist_s01", "mnist_s01.yaml", "configs/mnist_s01"):
        assert load_config(name) == expected
    monkeypatch.chdir(tmp_path)
    assert load_config("mnist_s01") == expected
    assert "table1_small is a study, not one run; it is run by:" in error_of("table1_small")
    assert "did you mean" not in error_of("table1_smal")


def test_a_missing_file_names_the_nearest(monkeypatch, tmp_path, write):
    monkeypatch.chdir(ROOT)
    assert "did you mean configs/mnist_s01.yaml" in error_of("configs/mnist_s01.yml")
    assert "did you mean configs/mnist_quick.yaml" in error_of("mnist_quik")
    mine = write("", "mine.yaml")
    assert f"did you mean {mine}" in error_of(tmp_path / "min.yaml")
    assert "is a folder" in error_of(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "pipe.yaml is no regular file; name a configuration file" in error_of(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError):
        find_config("/no/such/folder/x.yaml")


# the settings of the methods


@pytest.mark.parametrize("name", aggregator_names())
def test_methods_come_with_all_their_settings(name):
    config = load_config(BASE, [f"aggregator.name={name}"])
    assert config.aggregator.settings == aggregator_settings(name)


def test_settings_of_a_method_from_file_and_arguments(write):
    path = write("aggregator: {name: fedprox, mu_prox: 1e-2}\n")
    assert load_config(path).aggregator.settings == {"mu_prox": 0.01}
    assert load_config(path, ["--aggregator.mu_prox=1"]).aggregator.settings == {"mu_prox": 1.0}


def test_an_argument_for_a_setting_the_method_lacks_is_refused():
    message = error_of(BASE, "aggregator.name=fedprox", "aggregator.alpha=1")
    assert "aggregator.alpha" in message
    assert "fedprox" in message
    assert "mu_prox" in message
    assert "did you mean" not in message  # the same key once more


def test_changing_the_method_leaves_its_settings_behind_and_says_so(write, caplog):
    path = write("aggregator: {name: pfedgraph, lam: 0.5, lam_local: 0.01}\n")
    with caplog.at_level(logging.WARNING):
        config = load_config(path, ["aggregator.name=fedamp"])
    assert config.aggregator.settings == aggregator_settings("fedamp")  # its own `lam` means something else
    assert len(caplog.records) == 1
    assert "lam=0.5" in caplog.text
    assert "lam_local" not in caplog.text  # at its default: nothing is lost
    assert str(path) in caplog.text


def test_settings_that_two_methods_share_are_kept(write, caplog):
    path = write("aggregator: {name: jgesr, alpha: 0.2, fidelity: uniform, step: backtracking}\n")
    with caplog.at_level(logging.WARNING):
        config = load_config(path, ["aggregator.name=two_step"])
    expected = aggregator_settings("two_step") | {"alpha": 0.2, "fidelity": "uniform"}
    assert config.aggregator.settings == expected
    assert "step=backtracking" in caplog.text
    assert "kept: alpha=0.2, fidelity=uniform" in caplog.text


def test_nothing_is_said_where_the_method_stays(write, caplog):
    write("aggregator: {alpha: 0.2}\n", "base.yaml")
    path = write("base: base.yaml\naggregator: {beta: 2}\n")
    assert load_config(path, ["aggregator.gamma=3", "aggregator.name=jgesr"]).aggregator.settings == {
        **aggregator_settings("jgesr"),
        "alpha": 0.2,
        "beta": 2.0,
        "gamma": 3.0,
    }
    assert caplog.records == []


def test_too_few_clients_for_the_method():
    assert "jgesr needs at least 2" in error_of(BASE, "clients=1")
    assert load_config(BASE, ["clients=1", "aggregator.name=fedavg"]).clients == 1


# the configuration object


def test_direct_construction_is_checked_too():
    with pytest.raises(ValueError, match=r"rounds is 0"):
        Config(rounds=0)
    with pytest.raises(ValueError, match=r"rounds is '5'"):
        Config(rounds="5")
    with pytest.raises(ConfigError, match=r"^seed cannot be set, .* frozen; replace\(seed=\.\.\.\)"):
        Config().seed = 3


def test_another_method_begins_with_its_own_defaults():
    jgesr = Config().aggregator.replace(alpha=0.5)
    assert jgesr.replace(name="fedavg").settings == {}
    assert jgesr.replace(name="fedprox", mu_prox=0.5).settings == {"mu_prox": 0.5}
    assert jgesr.replace(name="jgesr", beta=2.0).settings["alpha"] == 0.5


def test_a_file_by_another_path_is_the_same_method(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text(
        "from jgesr_lightning.aggregators.fedavg import FedAvg\n"
        "class A(FedAvg):\n    def __init__(self, z=1, u=2):\n        super().__init__()\n"
    )
    monkeypatch.chdir(tmp_path)
    mine = load_config(BASE, ["aggregator.name=./m.py:A", "aggregator.z=5", "aggregator.u=0-2"]).aggregator
    assert mine.settings == {"z": 5, "u": "0-2"}  # no type is declared: text
    assert mine.replace(name=f"{tmp_path}/m.py:A", u=3).settings == {"z": 5, "u": 3}
    (tmp_path / "n.py").write_text((tmp_path / "m.py").read_text().replace("z=1", "z"))
    needing = load_config(BASE, ["aggregator.name=./n.py:A", "aggregator.z=5"]).aggregator
    assert needing.replace(name="./n.py:A", u=3).settings == {"z": 5, "u": 3}  # z has no default to fall back on


@pytest.mark.parametrize(
    "setting",
    ["rounds=0-2", "local.batch_size=0-2", "seed=00+3", "runtime.devices=0-1", "rounds=+0-2", "clients=0_0-2"],
)
def test_a_span_is_no_whole_number(setting):
    key, _, text = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"^{key} is '{re.escape(text)}'; it must be a whole number$"):
        load_config(BASE, [setting])
    assert load_config(BASE, ["name=0-2", "seed=007"]).name == "0-2"


def test_single_seeds_fall_back_on_the_seed_of_the_run():
    config = load_config(BASE, ["seed=3", "seeds.initial=5"])
    assert [config.seed_of(purpose) for purpose in ("partition", "initial", "channel", "batches")] == [3, 5, 3, 3]


def test_whether_the_name_was_given(write):
    path = write("rounds: 2\n")
    assert [load_config(path).named, load_config(path, ["name=run"]).named] == [False, True]
    assert load_config(path) == load_config(path, ["name=run"])
    assert [load_config(path).replace(**new).named for new in ({"seed": 3}, {"name": "run"})] == [False, True]
    assert load_config(write("name: run\n")).named


def test_run_folder():
    assert load_config(BASE, ["output_dir=a/b", "name=c"]).folder == Path("a/b/c")


def test_plain_values_and_back():
    config = load_config(BASE, ["logging.tags=[a]", "aggregator.name=cfl", "seed=2"])
    assert Config(**to_dict(config)) == config
    assert to_dict(config)["aggregator"]["eps1_rel"] == config.aggregator.settings["eps1_rel"]


texts = st.text(min_size=1, max_size=12).filter(lambda text: text.strip() == text and "${" not in text)
odd = st.sampled_from(
    ["null", "None", "~", "1e5", "true", "no", "1", "[a]", "{a: b}", "# x", "a: b", "ä", "'", '"', "- x"]
)


@given(
    name=(texts | odd).filter(
        lambda text: not text.startswith(".") and not set(text) & set("/\\") and text.isprintable()
    ),
    resume=st.none()  # ~ is of users, who may not exist
    | (texts | odd).filter(lambda text: not text.startswith("~") and text.isprintable()),
    tags=st.lists((texts | odd | st.sampled_from(["a\nb", "a\x85b", "\u2028b"])).filter(str.strip), max_size=3),
    lr=st.floats(1.2e-38, 3.4e38),
    seed=st.integers(0, 2**80),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_yaml_of_a_configuration_reads_back_the_same(tmp_path, name, resume, tags, lr, seed):
    start = load_config(None, [f"local.lr={lr!r}", f"seed={seed}"])
    config = start.replace(name=name, resume=resume, logging=start.logging.replace(tags=tuple(tags)))
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_mistakes_are_found_without_loading_torch():
    code = (
        "import sys; from jgesr_lightning.config import load_config, ConfigError\n"
        "try: load_config(None, ['local.lrr=1'])\n"
        "except ConfigError: sys.exit('torch' in sys.modules)\n"
        "sys.exit(5)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_an_older_run_is_completed_with_todays_defaults():
    assert completed({}) == to_dict(Config())
    config = load_config(BASE, ["aggregator.name=cfl", "logging.tags=[a]", "data.kappa=2", "seeds.channel=3"])
    assert completed(to_dict(config)) == to_dict(config)
    older = to_dict(config)
    del older["data"]["partition"], older["metric"], older["seeds"], older["aggregator"]["eps1_rel"]
    assert completed(older) == {**to_dict(config), "seeds": to_dict(Config())["seeds"]}
    outside = completed({"aggregator": {"name": "/nowhere/mine.py:Mine", "trim": 0.1}})
    assert outside["aggregator"] == {"name": "/nowhere/mine.py:Mine", "trim": 0.1}  # nothing is imported


def test_overrides_that_are_a_mapping_are_told_how_to_be_written():
    with pytest.raises(ConfigError, match="texts key=value"):
        load_config("mnist_quick", {"rounds": 3})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("rounds", "'rounds' is no setting: write key=value, such as local.lr=0.05"),
        ("name='a b", 'overrides are "name=\'a b"; No closing quotation'),
        ({"rounds": 3}, "overrides are texts key=value, such as 'rounds=3', not a mapping"),
    ],
)
def test_overrides_that_are_none_are_named(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value) == message


def test_there_is_one_zero():
    config = load_config(None, ["channel.noise=-0.0", "aggregator.name=jgesr", "aggregator.alpha=-0.0"])
    assert repr((config.channel.noise, config.aggregator.settings["alpha"])) == "(0.0, 0.0)"
