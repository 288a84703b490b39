"""The map of methods over two settings: numbers by hand, gaps, single seeds, labels from outside."""

import csv
import io
import itertools
import json

import pytest

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting import figures, report, table
from jgesr_lightning.reporting.collection import collect
from jgesr_lightning.reporting.map import csv_text, latex, main, markdown, standings_grid
from jgesr_lightning.reporting.map_plot import caption, lead_text, map_figure, short_names
from jgesr_lightning.reporting.maps import map_of
from jgesr_lightning.reporting.tables import tables_of
from tests.reporting.synthetic import change, make_run

NUMBER = itertools.count()


def runs(root, method, values, kappa=0.05, noise=0.1, **settings):
    """Write a run a seed."""
    for seed, value in enumerate(values):
        make_run(
            root, f"run_{next(NUMBER)}", value, method=method, seed=seed, noise=noise, kappa=kappa, with_files=False,
            **settings,
        )  # fmt: skip


def built(root, **keys):
    return map_of(collect([root]).runs, "accuracy/received", **keys)


def spot(root, at=(0.05, 0.1)):
    (panel,) = built(root).panels
    return panel.spots[at]


def cell_texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def frames(figure):
    return [patch for axes in figure.axes for patch in axes.patches if not patch.get_fill()]


def plane(root, noises=(0.1, 0.5), kappas=(0.1, 10), methods=("local", "fedavg", "jgesr"), **settings):
    for noise, kappa, method in itertools.product(noises, kappas, methods):
        base = {"local": 0.9 - 0.03 * kappa, "fedavg": 0.8 - 0.1 * noise, "jgesr": 0.84}[method]
        runs(root, method, [base, base + 0.01], kappa=kappa, noise=noise, **settings)


def test_the_lead_and_whether_three_seeds_can_tell(tmp_path):
    runs(tmp_path, "local", [0.90, 0.90, 0.90])
    runs(tmp_path, "fedavg", [0.80, 0.81, 0.82])
    runs(tmp_path, "cfl", [0.91, 0.93, 0.92])
    runs(tmp_path, "jgesr", [0.92, 0.93, 0.94])
    found = spot(tmp_path)
    assert (found.leader, found.base, found.best_other, found.seeds) == ("jgesr", "local", "jgesr", 3)
    assert found.lead.mean == pytest.approx(3)
    # deviation 1 over 3 seeds: 4.302653 / sqrt(3), Student's t with two degrees of freedom
    assert found.lead.half_width == pytest.approx(2.48414, abs=1e-5)
    # Holm among three: fedavg rejected at 0.05 / 3, jgesr's p of 0.0351 is above 0.05 / 2
    assert found.against["fedavg"].clear_of_all
    assert found.lead.p == pytest.approx(0.0351, abs=1e-4)
    assert found.lead.clear and not found.lead.clear_of_all
    assert lead_text(found) == "+3.00 *"
    figure = map_figure(built(tmp_path))
    assert cell_texts(figure) == ["jgesr\n+3.00 *"]
    assert frames(figure) == []


@pytest.mark.parametrize("name", ["jgesr_uniform_own_memory", "jgesr_uniform_own", "memory", "robust"])
def test_what_stands_in_a_cell_fits_into_it(tmp_path, name):
    plane(tmp_path, noises=(0.1, 0.5, 1, 2), kappas=(0.05, 0.1, 0.3, 1, 10))
    figure = map_figure(built(tmp_path, names=dict.fromkeys(("fedavg", "jgesr", "local"), name)))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (left, bottom), (right, top) = axes.transData.transform([(0, 1), (1, 0)])
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.width <= right - left and box.height <= top - bottom


def test_a_clear_lead_is_framed_and_a_baselines_stands_in_brackets(tmp_path):
    runs(tmp_path, "local", [0.90, 0.92, 0.91])
    runs(tmp_path, "fedavg", [0.80, 0.81, 0.82])
    runs(tmp_path, "jgesr", [0.8501, 0.8700, 0.8599])
    runs(tmp_path, "local", [0.60, 0.62, 0.61], kappa=1)
    runs(tmp_path, "fedavg", [0.80, 0.81, 0.82], kappa=1)
    runs(tmp_path, "jgesr", [0.8501, 0.8600, 0.8699], kappa=1)
    assert lead_text(spot(tmp_path)) == "(\u22125.00 **)"
    assert spot(tmp_path).leader == "local"
    assert lead_text(spot(tmp_path, (1, 0.1))) == "+5.00 **"
    figure = map_figure(built(tmp_path))
    assert cell_texts(figure) == ["local\n(\u22125.00 **)", "jgesr\n+5.00 **"]
    assert len(frames(figure)) == 2


def test_the_better_baseline_is_so_by_its_mean(tmp_path):
    runs(tmp_path, "local", [0.90, 0.80])
    runs(tmp_path, "fedavg", [0.84, 0.84])
    runs(tmp_path, "jgesr", [0.86, 0.86])
    found = spot(tmp_path)
    assert found.base == "local"
    assert found.lead.mean == pytest.approx(1)  # the better one seed by seed would be 0.87
    assert lead_text(found) == "+1.00"


def test_level_with_a_baseline_the_simpler_leads(tmp_path):
    runs(tmp_path, "local", [0.90])
    runs(tmp_path, "fedavg", [0.80])
    runs(tmp_path, "jgesr", [0.90004])
    assert spot(tmp_path).leader == "local"


def test_gaps(tmp_path):
    runs(tmp_path, "local", [0.90])
    runs(tmp_path, "jgesr", [0.95])
    runs(tmp_path, "local", [0.90], kappa=1, noise=2)
    runs(tmp_path, "fedavg", [0.80], kappa=1, noise=2)
    runs(tmp_path, "cfl", [0.91], kappa=1, noise=2)
    found = built(tmp_path)
    assert lead_text(spot(tmp_path)) == "no fedavg"
    assert sorted(cell_texts(map_figure(found))) == ["cfl\n+1.00", "jgesr\nno fedavg", "not run", "not run"]
    assert [one.label for one in found.standings()] == ["local", "fedavg", "cfl"]
    assert "1 of 2 cells lack local or fedavg and do not count: name others by --baseline METHOD" in markdown(found)


def test_a_cell_of_fewer_seeds_than_a_baselines_is_marked_and_not_one_run(tmp_path):
    for kappa in (0.1, 1):
        runs(tmp_path, "local", [0.80, 0.81, 0.82], kappa=kappa)
        runs(tmp_path, "fedavg", [0.81, 0.80, 0.82], kappa=kappa)
        runs(tmp_path, "jgesr", [0.85, 0.86, 0.87] if kappa == 1 else [0.85], kappa=kappa)
    found = built(tmp_path)
    text = markdown(found)
    few = found.panels[0].spots[0.1, 0.1]
    assert [few.fewer(label) for label in ("local", "fedavg", "jgesr")] == ["", "", " (1)"]
    assert not any(one.reliable for one in found.standings())
    assert "**+5.00 (1)** |" in text and "| kappa 0.1, s 0.1 (1) |" in text
    assert text.count("(n): on n seeds") == 2  # below the standings and above the cells
    assert r"\textbf{+5.00 (1)}" in latex(found) and latex(found).count("(n): on n seeds") == 2
    runs(tmp_path / "more", "jgesr", [0.85, 0.86, 0.87], kappa=0.1)
    sure = markdown(built(tmp_path))
    assert "(1)" not in sure and "(n)" not in sure and "| jgesr | **+5" in sure


def test_methods_level_to_the_decimals_shown_all_lead(tmp_path):
    runs(tmp_path, "local", [0.80])
    runs(tmp_path, "fedavg", [0.70])
    runs(tmp_path, "cfl", [0.90001])
    runs(tmp_path, "jgesr", [0.90003])
    found = built(tmp_path)
    assert spot(tmp_path).leaders == ["jgesr", "cfl"] and spot(tmp_path).leader == "jgesr"
    assert {one.label: one.leads for one in found.standings()} == {"local": 0, "fedavg": 0, "cfl": 1, "jgesr": 1}
    assert markdown(found).count("| **+10.00** | **+10.00** |") == 1  # in the cell, cfl and jgesr
    rows = csv.DictReader(io.StringIO(csv_text(found)))
    assert [row["method"] for row in rows if row["leads"] == "1"] == ["cfl", "jgesr"]


def test_without_a_shared_seed_there_is_no_lead(tmp_path):
    runs(tmp_path, "local", [0.90])
    make_run(tmp_path, "other", 0.8, method="fedavg", seed=7, with_files=False)
    runs(tmp_path, "jgesr", [0.95])
    assert lead_text(spot(tmp_path)) == "other seeds"


def test_one_seed_tells_nothing_of_chance(tmp_path):
    runs(tmp_path, "local", [0.90])
    runs(tmp_path, "fedavg", [0.80])
    runs(tmp_path, "jgesr", [0.95])
    found = built(tmp_path)
    assert lead_text(spot(tmp_path)) == "+5.00"
    assert "One seed: nothing can be said of chance" in caption(found, found.panels)
    assert frames(map_figure(found)) == []
    assert "| jgesr | **+5.00** |" in markdown(found)


def test_who_is_never_far_below_and_somewhere_above_both(tmp_path):
    for kappa, local, fedavg, careful, bold in [(0.1, 0.9, 0.7, 0.896, 0.84), (1, 0.7, 0.8, 0.83, 0.99)]:
        runs(tmp_path, "local", [local] * 2, kappa=kappa)
        runs(tmp_path, "fedavg", [fedavg - 0.001, fedavg + 0.001], kappa=kappa)
        runs(tmp_path, "jgesr", [careful - 0.002, careful + 0.002], kappa=kappa, fidelity="uniform")
        runs(tmp_path, "jgesr", [bold - 0.002, bold + 0.002], kappa=kappa)
    found = {one.label: one for one in built(tmp_path).standings()}
    assert list(found) == ["local", "fedavg", "jgesr", "jgesr (uniform)"]
    ends = {label: (one.worst[0].mean, one.best[0].mean) for label, one in found.items()}
    assert ends["local"] == pytest.approx((-10, 0))
    assert ends["fedavg"] == pytest.approx((-20, 0))
    assert ends["jgesr"] == pytest.approx((-6, 19))
    assert ends["jgesr (uniform)"] == pytest.approx((-0.4, 3))
    assert [label for label, one in found.items() if one.reliable] == ["jgesr (uniform)"]
    assert found["jgesr"].worst[1] == "kappa 0.1, s 0.1"
    assert found["jgesr"].best[1] == "kappa 1, s 0.1"
    assert [(one.leads, one.gains, one.losses, one.spots) for one in found.values()] == [
        (1, 0, 1, 2), (0, 0, 1, 2), (1, 1, 1, 2), (0, 1, 0, 2),
    ]  # fmt: skip
    row = standings_grid(built(tmp_path)).rows[-1]
    assert row[1].bold and row[1].text.startswith("-0.40 [")
    for method in ("local", "fedavg"):  # a cell more, in which it was not run
        runs(tmp_path, method, [0.5] * 2, kappa=10)
    assert not any(one.reliable for one in built(tmp_path).standings())


def test_panels_are_what_else_differs(tmp_path):
    plane(tmp_path, data="cifar10", fraction=0.5)
    plane(tmp_path, fraction=0.1)
    plane(tmp_path, fraction=0.05, kappas=(0.1, 10, 0.3))
    found = built(tmp_path)
    assert [panel.title for panel in found.panels] == [
        "mnist, fraction 0.05", "mnist, fraction 0.1", "cifar10, fraction 0.5",
    ]  # fmt: skip
    assert found.panels[0].rows == [0.1, 0.3, 10]
    assert found.is_plane
    assert found.standings()[0].worst[1].startswith("mnist, fraction 0.05, kappa 10, s 0.1")
    turned = built(tmp_path, rows="channel.noise", columns="data.fraction")
    assert [panel.title for panel in turned.panels] == [
        "mnist, kappa 0.1", "mnist, kappa 0.3", "mnist, kappa 10", "cifar10, kappa 0.1", "cifar10, kappa 10",
    ]  # fmt: skip
    assert turned.panels[0].columns == [0.05, 0.1]
    for count in (20, 3):
        plane(tmp_path / "clients", clients=count)
    assert [panel.title for panel in built(tmp_path / "clients").panels] == ["mnist, clients 3", "mnist, clients 20"]
    noise_by_data = built(tmp_path / "clients", rows="data.name", columns="clients")
    assert [panel.title for panel in noise_by_data.panels][:2] == ["s 0.1, kappa 0.1", "s 0.1, kappa 10"]
    plane(tmp_path / "one", noises=(0.1,), kappas=(0.1,))
    assert [panel.title for panel in built(tmp_path / "one", rows="data.name").panels] == ["all runs"]


def test_labels_of_any_length_and_from_outside(tmp_path):
    runs(tmp_path, "local", [0.90])
    runs(tmp_path, "fedavg", [0.80])
    runs(tmp_path, "./parts/mine.py:Mine$^{2}", [0.95], strength=0.125)
    figure = map_figure(built(tmp_path))
    assert cell_texts(figure) == ["Mine\\$^ [1]\n+5.00"]
    names, legend = short_names(["two_step", "jgesr (neighbours=5)", "jgesr (neighbours=7)"], {})
    assert len(set(names.values())) == 3
    assert list(legend.values()) == ["[1] jgesr (neighbours=5)", "[2] jgesr (neighbours=7)"]


def test_names_from_outside_break_no_table(tmp_path):
    for data in ("a|b-2", "mnist"):
        runs(tmp_path, "local", [0.90], data=data)
        runs(tmp_path, "fedavg", [0.80], data=data)
    found = built(tmp_path, names={"local": "own|-1_"})
    rows = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {5, 10}
    assert "| kappa 0.05, s 0.1 | own\\|-1\\_ 90.00 | **0** | -10.00 |" in rows
    assert "own\\textbar{}-1\\_ 90.00 &" in latex(found)


def test_a_studys_names_stand_for_labels(tmp_path, capsys):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("methods: {local: {}, fedavg: {}, sharp: {}, sharp_own_memory: {}}\n")
    for kappa, noise in itertools.product((0.1, 10), (0.1, 0.5)):
        for name, method, value, settings in [
            ("local", "local", 0.8, {}),
            ("fedavg", "fedavg", 0.7, {}),
            ("sharp", "jgesr", 0.81, {"alpha": 0.5, "max_iter": 7}),
            ("sharp_own_memory", "jgesr", 0.9, {"alpha": 0.5, "fidelity": "uniform"}),
        ]:
            make_run(folder, f"mnist_s{noise}_{name}_{kappa}_seed0", value, method=method, noise=noise, kappa=kappa,
                     with_files=False, **settings)  # fmt: skip
    found = collect([tmp_path])
    long = {"jgesr (alpha=0.5, max_iter=7)": "sharp", "jgesr (uniform, alpha=0.5)": "sharp_own_memory"}
    assert found.names == long
    assert found.order == ["local", "fedavg", *long]
    assert table.main([str(tmp_path / "runs"), "--store", str(tmp_path / "s.json")]) == 0
    assert (collect([tmp_path / "s.json"]).names, collect([tmp_path / "s.json"]).order) == (long, found.order)
    plane = map_of(found.runs, "accuracy/received", names=found.names)
    assert cell_texts(map_figure(plane))[0] == "sharp_own_\nmemory\n+10.00"
    below = map_figure(plane).get_supxlabel()
    assert below == "sharp_own_memory: jgesr (uniform,\n    alpha=0.5)"  # no wider than the picture
    assert "| sharp_own_memory: jgesr (uniform, alpha=0.5) | **+10.00** |" in markdown(plane)
    capsys.readouterr()
    against = ["--baseline", "local", "--baseline", "fedavg", "--baseline", "sharp", "--metric", "accuracy/received"]
    assert main([str(tmp_path / "s.json"), *against]) == 0
    text = capsys.readouterr().out
    assert "the best of local, fedavg and sharp of a cell" in text
    assert "memory: jgesr (uniform, alpha=0.5) | **+9.00** |" in text
    with pytest.raises(ConfigError, match=r"no method 'sharpp'.*sharp"):
        main([str(tmp_path / "s.json"), "--baseline", "sharpp"])


def test_a_name_that_stands_for_several_methods_stands_for_none(tmp_path):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("methods: {jgesr: {}, soft: {name: graph_filter}}\n")
    for (alpha, value), kappa in itertools.product(((0.01, 0.8), (0.05, 0.9)), (0.1, 10)):
        for name, method in (("jgesr", "jgesr"), ("soft", "graph_filter")):
            make_run(folder, f"mnist_s0.1_{name}_{alpha}_{kappa}_seed0", value, method=method, alpha=alpha, kappa=kappa,
                     with_files=False)  # fmt: skip
    found = collect([tmp_path])
    assert found.names == {}
    assert found.order == ["jgesr", "jgesr (alpha=0.01)", "graph_filter (alpha=0.01)", "graph_filter"]
    assert found.label_of("jgesr") == "jgesr"
    assert built(tmp_path, baselines=[found.label_of("jgesr")]).panels[0].spots[0.1, 0.1].base == "jgesr"
    assert tables_of([folder]).tables[0].reference == "jgesr"


def test_a_name_that_two_studies_give_to_two_methods_stands_for_none(tmp_path):
    for study, alpha in (("one", 0.5), ("two", 0.7)):
        make_run(tmp_path / study, "mnist_s0.1_tuned_seed0", 0.9, method="jgesr", alpha=alpha)
        (tmp_path / study / "study.yaml").write_text("methods: {tuned: {name: jgesr}}\n")
    found = collect([tmp_path])
    assert (found.names, found.order) == ({}, ["jgesr (alpha=0.5)", "jgesr (alpha=0.7)"])
    with pytest.raises(ConfigError, match="no method 'tuned'"):
        found.label_of("tuned")
    assert collect([tmp_path / "two"]).label_of("tuned") == "jgesr (alpha=0.7)"


def test_the_command_writes_tables_and_the_picture(tmp_path, capsys):
    plane(tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--format", "all", "--out", str(tmp_path / "out")]) == 0
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["map.csv", "map.md", "map.pdf", "map.png", "map.svg", "map.tex"]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out" / "map.csv").read_text())))
    (line,) = [
        one for one in lines if (one["method"], one["data.kappa"], one["channel.noise"]) == ("jgesr", "10", "0.5")
    ]
    assert (line["better_baseline"], line["leads"], line["paired_seeds"]) == ("fedavg", "1", "2")
    assert float(line["method_minus_better"]) == pytest.approx(9)
    assert "\\caption{" in (tmp_path / "out" / "map.tex").read_text()
    capsys.readouterr()
    # a file of stored results says the same
    assert table.main([str(tmp_path / "runs"), "--store", str(tmp_path / "map.json")]) == 0
    assert csv_text(built(tmp_path / "map.json")) == csv_text(built(tmp_path / "runs"))
    capsys.readouterr()
    assert main([str(tmp_path / "map.json")]) == 0
    assert capsys.readouterr().out.startswith("local test accuracy of the model each client receives")


def test_the_command_says_what_is_wrong(tmp_path):
    plane(tmp_path, kappas=(0.1,))
    for path in tmp_path.rglob("summary.json"):
        change(path.parent, {"last.accuracy/received_std": 0.1})
    for arguments, words in [
        (["--rows", "data.kapa"], "data.kappa"),
        (["--rows", "channel.noise"], "both channel.noise"),
        (["--rows", "seed"], "over which a map takes the mean; the runs differ in channel.noise$"),
        (["--rows", "aggregator.name"], "tells methods apart, .*; the runs differ in channel.noise$"),
        (["--columns", "aggregator.alpha"], "--columns is 'aggregator.alpha', which tells methods apart"),
        (["--metric", "loss/train"], "accuracies"),
        (["--metric", "accuracy/received_std"], "of which less is better"),
    ]:
        with pytest.raises(ConfigError, match=words):
            main([str(tmp_path), *arguments])


def test_a_setting_without_a_say_makes_no_rows(tmp_path):
    plane(tmp_path)
    for path in tmp_path.rglob("summary.json"):
        change(path.parent, data={"partition": "natural"})
    with pytest.raises(ConfigError, match=r"--rows is 'data.kappa', which no run has as a setting"):
        main([str(tmp_path)])
    (panel,) = built(tmp_path, rows="clients").panels
    assert panel.title == "mnist"


def test_one_baseline_is_named_and_three_are(tmp_path):
    plane(tmp_path)
    runs(tmp_path, "jgesr", [0.8], kappa=1)  # nothing to compare it with
    for baselines, named in (
        (["fedavg"], "fedavg"),
        (["local", "fedavg", "jgesr"], "the best of local, fedavg and jgesr"),
    ):
        found = built(tmp_path, baselines=baselines)
        text = markdown(found) + latex(found) + caption(found, found.panels)
        assert f"| cell | {named} |" in text
        assert f"nowhere more than 0.5 below {named}, and somewhere more than 2 above it" in text
        assert f"1 of 5 cells lack {' or '.join(baselines)} and do not count" in text
        assert f"its lead over {named} of the same cell" in text and "where that one leads" in text
        assert "both" not in text and "two" not in text
    assert "| cell | better of both |" in markdown(built(tmp_path))


def test_figures_and_the_page_have_the_map_where_there_is_one(tmp_path):
    plane(tmp_path / "with")
    assert "map" in [drawing.name for drawing in figures.draw(tables_of([tmp_path / "with"]))]
    assert report.main([str(tmp_path / "with"), "--out", str(tmp_path / "with.html")]) == 0
    page = (tmp_path / "with.html").read_text()
    assert "Where which method leads" in page and "there" in page
    std = "accuracy/received_std"  # of which less is better, so that the largest leads nowhere
    for path in (tmp_path / "with").glob("*/summary.json"):
        change(path.parent, {f"last.{std}": json.loads(path.read_text())["last"]["accuracy/received"] / 10})
    drawn = [drawing.name for drawing in figures.draw(tables_of([tmp_path / "with"], std))]
    assert drawn and "map" not in drawn
    plane(tmp_path / "without", kappas=(0.1,))
    names = [drawing.name for drawing in figures.draw(tables_of([tmp_path / "without"]))]
    assert "map" not in names
    assert report.main([str(tmp_path / "without"), "--out", str(tmp_path / "without.html")]) == 0
    assert "Where which method leads" not in (tmp_path / "without.html").read_text()


def test_settings_of_the_downlink_are_called_so(tmp_path):
    for method, rate, down in itertools.product(("local", "fedavg"), (0.0, 0.3), (0.0, 0.2)):
        folder = make_run(tmp_path, f"run_{next(NUMBER)}", 0.9, method=method, missing=rate, with_files=False)
        change(folder, **{"config.downlink": {"noise": down, "missing_rate": 0.0}})
    rows = markdown(built(tmp_path, rows="downlink.noise", columns="channel.missing_rate")).splitlines()
    assert [row.split(" | ")[0] for row in rows if row.startswith("| downlink")] == [
        f"| downlink noise {down}, missing_rate {rate}" for down in ("0", "0.2") for rate in ("0", "0.3")
    ]
    titles = [panel.title for panel in built(tmp_path).panels]
    assert titles[-1] == "mnist, missing_rate 0.3, downlink noise 0.2"
