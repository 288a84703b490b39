"""Methods by name: what is known, what is refused, and what the configuration layer is told."""

import inspect

import pytest

from jgesr_lightning.aggregators import (
    Aggregator,
    aggregator_arguments,
    aggregator_class,
    aggregator_names,
    aggregator_settings,
    build_aggregator,
)

PAPER = ["local", "fedavg", "fedprox", "cfl", "fedamp", "pfedgraph", "two_step", "jgesr"]


def test_all_methods_of_the_paper_are_known():
    assert set(PAPER) <= set(aggregator_names())


@pytest.mark.parametrize("name", aggregator_names())
def test_every_name_builds_with_its_defaults(name):
    aggregator = build_aggregator(name)
    assert isinstance(aggregator, Aggregator) and aggregator.name == name
    assert set(aggregator.needs) <= {"previous", "initial"}
    rebuilt = build_aggregator(name, **aggregator_settings(name))
    assert type(rebuilt) is aggregator_class(name)


@pytest.mark.parametrize("name", aggregator_names())
def test_settings_have_types_and_defaults(name):
    for setting, (hint, default) in aggregator_arguments(name).items():
        assert default is not inspect.Parameter.empty
        assert hint is float if isinstance(default, float) else True, setting


@pytest.mark.parametrize(
    ("name", "setting", "default", "kind"),
    [
        ("fedprox", "mu_prox", 0.01, float),
        ("cfl", "warmup_rounds", 10, int),
        ("cfl", "eps1", None, float | None),
        ("fedamp", "variant", "heuristic", str),
        ("fedamp", "self_weight", None, float | None),
        ("pfedgraph", "lam", 0.8, float),
        ("median", "weighted", False, bool),
    ],
)
def test_some_settings(name, setting, default, kind):
    assert aggregator_arguments(name)[setting] == (kind, default)


@pytest.mark.parametrize("ask", [build_aggregator, aggregator_settings, aggregator_arguments, aggregator_class])
def test_unknown_name_lists_the_known_and_the_nearest(ask):
    with pytest.raises(ValueError, match=r"'fedag' \(did you mean 'fedavg'\?\); known: .*pfedgraph"):
        ask("fedag")


@pytest.mark.parametrize("name", [None, 3, ["fedavg"], ""])
def test_names_of_the_wrong_type(name):
    with pytest.raises(ValueError, match="known: local"):
        build_aggregator(name)


def test_unknown_setting_lists_the_known_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"cfl has no setting 'eps1_re' \(did you mean 'eps1_rel'\?\); known: eps1, eps2"
    ):
        build_aggregator("cfl", eps1_re=0.1)
    with pytest.raises(ValueError, match="fedavg has no setting 'alpha'; it has none"):
        build_aggregator("fedavg", alpha=1)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("fedprox", "mu_prox", -0.1),
        ("fedprox", "mu_prox", "0.1"),
        ("fedprox", "mu_prox", None),
        ("fedprox", "mu_prox", True),
        ("fedprox", "mu_prox", float("nan")),
        ("fedprox", "mu_prox", float("inf")),
        ("cfl", "eps1_rel", -1),
        ("cfl", "warmup_rounds", -1),
        ("cfl", "warmup_rounds", 2.5),
        ("cfl", "min_cluster_size", 0),
        ("cfl", "eps1", -1),
        ("fedamp", "variant", "heuristics"),
        ("fedamp", "sigma", 0),
        ("fedamp", "a", 0),
        ("fedamp", "lam", -1),
        ("fedamp", "self_weight", 1.5),
        ("pfedgraph", "lam", -0.1),
        ("pfedgraph", "lam_local", "x"),
        ("median", "weighted", "yes"),
        ("median", "weighted", 1),
    ],
)
def test_wrong_values_are_refused_by_name(name, setting, value):
    with pytest.raises(ValueError, match=f"^{setting} is "):
        build_aggregator(name, **{setting: value})


@pytest.mark.parametrize(
    ("name", "setting"),
    [("fedprox", "mu_prox"), ("fedamp", "sigma"), ("pfedgraph", "lam"), ("cfl", "eps1_rel"), ("fedamp", "self_weight")],
)
def test_an_integer_is_fine_where_a_float_is_meant(name, setting):
    assert getattr(build_aggregator(name, **{setting: 1}), setting) == 1


def test_absolute_thresholds_of_cfl_go_together():
    with pytest.raises(ValueError, match="eps1 and eps2 go together"):
        build_aggregator("cfl", eps1=0.4)
