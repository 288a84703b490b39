"""Checks of values that users give: one line that names the value and what would do."""

import json
import math
from array import array

import numpy as np
import pytest
import torch

from jgesr_lightning import names
from jgesr_lightning.checks import SYNONYMS, flag, nearest, number, one_of, plain, whole
from jgesr_lightning.config import KEYS, ConfigError, load_config


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("fedagv", ["local", "fedavg"], "fedavg"),
        ("FEDAVG", ["local", "fedavg"], "fedavg"),
        ("lenet", ["LeNet"], "LeNet"),
        ("learning_rate", ["local.momentum", "local.lr"], "local.lr"),
        ("learning_rate", ["learning_rates", "other"], "learning_rates"),  # what it looks like, where lr is not known
        ("received", ["accuracy/trained", "accuracy/received"], "accuracy/received"),
        ("zzz", ["local", "fedavg"], None),
        ("", ["local"], None),
    ],
)
def test_the_word_that_was_meant(word, known, meant):
    assert nearest(word, known) == (f" (did you mean {meant!r}?)" if meant else "")


def test_words_that_have_only_half_their_letters_in_common_are_no_hint():
    assert nearest("fast", ["auto", "sequential", "stacked"]) == ""


def test_synonyms_lead_to_what_there_is():
    words = {"accuracy/received", "accuracy/trained"}.union(*names.BUILTIN.values())
    assert set(SYNONYMS.values()) - set(KEYS) - words == set()
    assert not set(SYNONYMS) & {key for key in KEYS if "." not in key}  # a word that is a key means itself


@pytest.mark.parametrize(
    ("setting", "ours"),
    [
        # PFLlib, system/main.py
        ("global_rounds=5", "rounds"),
        ("num_clients=5", "clients"),
        ("join_ratio=0.5", "participation"),
        ("local_epochs=1", "local.epochs"),
        ("batch_size=10", "local.batch_size"),
        ("local_learning_rate=0.1", "local.lr"),
        ("learning_rate_decay=true", "local.schedule"),
        ("learning_rate_decay_gamma=0.9", "local.schedule_factor"),
        ("dataset=MNIST", "data.name"),
        ("algorithm=FedAvg", "aggregator.name"),
        ("goal=test", "name"),
        ("device=cuda", "runtime.accelerator"),
        ("device_id=0", "runtime.devices"),
        ("eval_gap=1", "evaluation.every"),
        ("save_folder_name=items", "output_dir"),
        ("momentum=0.1", "local.momentum"),
        # pFedGraph, pytorch/*/config.py
        ("gpu=1", "runtime.devices"),
        ("n_parties=10", "clients"),
        ("comm_round=50", "rounds"),
        ("epochs=10", "local.epochs"),
        ("num_local_iterations=400", "local.epochs"),
        ("init_seed=0", "seed"),
        ("datadir=data", "data.root"),
        ("partition=noniid-skew", "data.partition"),
        ("skew_class=2", "data.classes_per_client"),
        ("reg=1e-5", "local.weight_decay"),
        ("sample_fraction=1.0", "participation"),
        ("lam=0.01", "aggregator.lam"),
        ("data.partition=noniid-skew", "shards"),
        # FedLab, the standalone examples
        ("com_round=10", "rounds"),
        ("global_round=10", "rounds"),
        ("sample_ratio=0.1", "participation"),
        ("dir_alpha=0.1", "data.kappa"),
        # pfl-research, benchmarks
        ("central_num_iterations=10", "rounds"),
        ("cohort_size=10", "participation"),
        ("local_num_epochs=1", "local.epochs"),
        ("evaluation_frequency=5", "evaluation.every"),
        # Flower, its templates' [tool.flwr.app.config] and strategies
        ("num-server-rounds=3", "rounds"),
        ("fraction-fit=0.5", "participation"),
        ("fraction-train=0.5", "participation"),
        ("local-epochs=1", "local.epochs"),
        ("learning-rate=0.1", "local.lr"),
        ("batch-size=32", "local.batch_size"),
        ("lr=0.1", "local.lr"),
        ("options.num-supernodes=10", "clients"),
        ("proximal-mu=0.1", "local.proximal_mu"),
        ("strategy=FedAvg", "aggregator.name"),
        ("model.name=CNN", "fedavg_cnn"),
        # of ours, a section's key and a method's setting alike
        ("groups=0.7", "data.groups' or 'aggregator.groups"),
        ("aggregator.name=FedAvg", "fedavg"),
    ],
)
def test_words_of_other_packages_lead_to_ours(setting, ours):
    with pytest.raises(ConfigError) as caught:
        load_config("mnist_s01", [setting])
    assert f"(did you mean '{ours}'?)" in str(caught.value)


@pytest.mark.parametrize(
    ("check", "value", "bounds", "reason"),
    [
        (number, True, {}, "must be a finite number"),
        (number, "1", {}, "must be a finite number"),
        (number, np.bool_(True), {}, "must be a finite number"),
        (number, math.nan, {}, "must be a finite number"),
        (number, -1, {"at_least": 0}, "must be at least 0"),
        (number, 0, {"above": 0}, "must be above 0"),
        (number, 1.5, {"at_most": 1}, "must be at most 1"),
        (whole, 1.0, {}, "must be a whole number"),
        (whole, False, {}, "must be a whole number"),
        (whole, 1, {"at_least": 2}, "must be at least 2"),
        (flag, 1, {}, "must be true or false"),
    ],
)
def test_values_that_will_not_do(check, value, bounds, reason):
    with pytest.raises(ValueError, match=rf"^x is .*; it {reason}$"):
        check("x", value, **bounds)


def test_values_that_will_do():
    number("x", 1, at_least=1, at_most=1, above=0)
    number("x", np.float32(0.5), above=0)
    whole("x", 0)
    whole("x", np.int64(3), at_least=3)  # what a loop over np.arange gives
    flag("x", False)
    one_of("x", "a", ["a", "b"])


def test_a_word_that_is_not_known_lists_those_that_are():
    with pytest.raises(ValueError, match=r"^x is 'c'; known: aaaa, bbbb$"):
        one_of("x", "c", iter(["aaaa", "bbbb"]))


def test_plain_values_are_what_every_file_can_hold():
    given = {"a": np.float64(0.5), 3: [torch.ones(2), (True, None, "x")], "n": math.nan, "z": torch.tensor(7)}
    found = plain("info", given)
    assert json.loads(json.dumps(found))["3"] == [[1.0, 1.0], [True, None, "x"]]
    assert found["a"] == 0.5 and type(found["a"]) is float and found["z"] == 7 and math.isnan(found["n"])
    assert plain("info", array("d", [1, 2])) == [1.0, 2.0]
    models = {"models": torch.zeros(6, 50_000)}
    with pytest.raises(ValueError, match=r"^info has 100,001 numbers"):
        plain("info", [0] * 100_001)
    for odd, said in (
        ({"a": [object()]}, "info['a'][0] is a object; it must be"),
        (print, "info is a builtin"),
        (models, "info['models'] has 300,000 numbers, which every round would keep; a few are meant, 100,000 at most"),
    ):
        with pytest.raises(ValueError) as caught:
            plain("info", odd)
        assert str(caught.value).startswith(said)
