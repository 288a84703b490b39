import itertools
import os
import re

import numpy as np
import pytest

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting import plots, report
from jgesr_lightning.reporting.collection import collect
from jgesr_lightning.reporting.comparisons import Dot, dot_plot, forest_plot, go_on
from jgesr_lightning.reporting.figures import draw, main
from jgesr_lightning.reporting.network import graph_network
from jgesr_lightning.reporting.tables import tables_of
from tests.reporting.synthetic import PAPERS, built, change, make_run, named_study


def names(root, metric="accuracy/received"):
    return {drawing.name: drawing for drawing in draw(tables_of([root], metric))}


def lines(drawing):
    found = drawing.figure.axes[0].get_lines()
    return {line.get_label(): line.get_xydata().tolist() for line in found if not line.get_label().startswith("_")}


def test_curves_are_means_over_seeds(tmp_path):
    make_run(tmp_path, "a", 0.90, method="fedavg", seed=0)
    make_run(tmp_path, "b", 0.96, method="fedavg", seed=1)
    drawing = names(tmp_path)["rounds_mnist_s_0.1"]
    assert lines(drawing)["fedavg"] == [[0, pytest.approx(31)], [1, pytest.approx(62)], [2, pytest.approx(93)]]
    assert "plain mean over clients" in drawing.caption
    assert "Lines: mean over 2 seeds; bands: one sample standard deviation to either side" in drawing.caption
    # before training there is no trained model
    assert lines(names(tmp_path, "accuracy/trained")["rounds_mnist_s_0.1"])["fedavg"][0][0] == 1


def test_a_method_has_one_colour_in_all_figures_and_never_another_methods(tmp_path):
    own = "jgesr_lightning.aggregators.median:Median"  # as somebody's own method would be named
    for seed, step in enumerate((0, 0.01, 0.03)):
        for place, method in enumerate(("fedavg", own, "jgesr")):
            accuracy = 0.8 + place / 20 + step * (place + 1)
            folder = make_run(tmp_path, f"{place}_{seed}", accuracy, method=method, seed=seed)
            change(folder, clients={"accuracy/received": [0.5, 0.9]})
    found = names(tmp_path)
    labels = ["fedavg", "Median", "jgesr"]
    curves = {line.get_label(): line.get_color() for line in found["rounds_mnist_s_0.1"].figure.axes[0].get_lines()}
    assert len({curves[label] for label in labels}) == 3 and curves["jgesr"] == plots.STYLES["jgesr"][0]
    for name in ("means_mnist_s_0.1", "differences_mnist_s_0.1", "clients_mnist_s_0.1"):
        axes = found[name].figure.axes[0]
        for place, tick in enumerate(axes.get_yticklabels()):
            marked = [
                line.get_color()
                for line in axes.get_lines()
                if line.get_marker() in ("o", "s") and line.get_markerfacecolor() != "none"
                and abs(float(np.mean(line.get_ydata())) - place) < 0.4
            ]  # fmt: skip
            assert marked == [curves[tick.get_text()]], name


def test_intervals_beyond_the_axis_end_in_arrows_and_those_of_means_where_percentages_do():
    dots = [Dot("fedavg", 97.0, 30.0), Dot("local", 98.0, None), Dot("jgesr", 99.0, 0.5)]
    axes = dot_plot(dots, plots.looks(plots.STYLES), "accuracy (%)").axes[0]
    low, high = axes.get_xlim()
    assert 0 <= low < 97 and high == 100 and go_on(dots, percent=True)
    assert [(line.get_marker(), *line.get_xdata()) for line in axes.get_lines() if line.get_marker() in "<>"] == [
        ("<", pytest.approx(low, abs=0.1))
    ]
    assert max(max(line.get_xdata()) for line in axes.get_lines()) <= 100
    dots = [Dot("fedavg", -1.0, 2.0, None, 50.0), Dot("local", 1.0, 0.2, None, 0.4)]
    axes = forest_plot(dots, plots.looks(plots.STYLES), "points").axes[0]
    low, high = axes.get_xlim()
    arrows = [(line.get_marker(), *line.get_xdata()) for line in axes.get_lines() if line.get_marker() in "<>"]
    assert arrows == [("<", pytest.approx(low, abs=0.2)), (">", pytest.approx(high, abs=0.2))] and go_on(
        dots, percent=False
    )
    assert not go_on(dots[1:], percent=False)


def test_missing_rates_and_noise_levels_become_axes(tmp_path):
    for rate, accuracy in [(0.0, 0.9), (0.05, 0.8), (0.1, 0.7)]:
        make_run(tmp_path, f"missing_{rate}", accuracy, method="jgesr", missing=rate)
    for noise, accuracy in [(0.2, 0.85), (0.5, 0.75)]:
        make_run(tmp_path, f"noise_{noise}", accuracy, method="jgesr", noise=noise)
    found = names(tmp_path)
    assert lines(found["missing_mnist_s_0.1"])["jgesr"] == [[0, 90], [0.05, 80], [0.1, pytest.approx(70)]]
    assert lines(found["noise_mnist"])["jgesr"] == [[0.1, 90], [0.2, 85], [0.5, 75]]


def test_graphs_of_methods_that_have_one(tmp_path):
    for method in ("jgesr", "fedavg", "cfl"):
        make_run(tmp_path, method, 0.9, method=method)
    found = names(tmp_path)
    assert {name for name in found if name.startswith("graph")} == {
        "graph_jgesr_mnist_s_0.1",
        "graph_cfl_mnist_s_0.1",
    }
    image = found["graph_jgesr_mnist_s_0.1"].figure.axes[0].images[0]
    assert image.get_clim() == (0, 1)  # the graph of the last round, not an earlier one
    assert "round 2" in found["graph_jgesr_mnist_s_0.1"].caption
    assert "edge weight" in found["graph_jgesr_mnist_s_0.1"].caption
    assert "mixing weight" in found["graph_cfl_mnist_s_0.1"].caption


def test_it_is_said_whose_objective_is_drawn(tmp_path):
    for seed in (3, 4):
        make_run(tmp_path, f"a{seed}", 0.9, seed=seed)
    assert "of one run a method (seed 3), less" in names(tmp_path)["objective_mnist_s_0.1"].caption
    make_run(tmp_path, "b", 0.9, method="two_step", seed=4)
    assert "(two_step: seed 4, jgesr: seed 3), less" in names(tmp_path)["objective_mnist_s_0.1"].caption


def test_the_objective_of_the_last_aggregation(tmp_path):
    make_run(tmp_path, "a", 0.9, method="jgesr")
    assert [x for x, _ in lines(names(tmp_path)["objective_mnist_s_0.1"])["jgesr"]] == [0, 1, 2]


def test_summaries_alone_still_give_what_they_can(tmp_path):
    make_run(tmp_path, "a", 0.9, method="jgesr", with_files=False)
    assert set(names(tmp_path)) == {"objective_mnist_s_0.1"}  # no clients, no second method


def test_command_writes_png_svg_pdf_and_captions(tmp_path, capsys):
    make_run(tmp_path, "a", 0.9, method="jgesr")
    make_run(tmp_path, "lost", 0.9, status="failed")
    assert main([str(tmp_path)]) == 0
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert "rounds_mnist_s_0.1.png" in written
    assert "rounds_mnist_s_0.1.svg" in written
    pdf = (tmp_path / "figures" / "rounds_mnist_s_0.1.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-") and b"/Type3" not in pdf and b"CreationDate" not in pdf
    captions = (tmp_path / "figures" / "captions.txt").read_text(encoding="utf-8")
    assert {line for line in captions.splitlines() if f"{line}.png" in written} == set(names(tmp_path))
    assert all(f"{name}\n{drawing.caption}\n" in captions for name, drawing in names(tmp_path).items())
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in written)
    assert "lost: failed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="accuracies"):
        main([str(tmp_path), "--metric", "loss/train"])


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("metrics.csv", b"round,accuracy/received\n0,0.1\xff\n", "can't decode byte 0xff"),
        ("metrics.csv", b"round,accuracy/received\nx,0.1\n", "invalid literal"),
        ("metrics.csv", b"round,accuracy/received\n0,0.1\n1", "a row is not as long as the header"),
        ("metrics.csv", b"", "the file is empty"),
        ("partition.csv", b"", "the file has no clients"),
        ("partition.csv", b"client,train,test,zero,one\n0,6,2,8,0\n1,6,2,4", "a row is not as long as the header"),
        ("partition.csv", b"client,train,test,zero,one\n0,6,2,8,0\n", "has 1 clients, graphs.npz 3"),
        ("partition.csv", b"client,train,test,zero,one\n0,6,2,8,nan\n", "a count is not a number"),
        ("graphs.npz", None, "the file is no archive of arrays"),  # cut short
        ("graphs.npz", b"", "the file is no archive of arrays"),
        ("graphs.npz", b"\x80\x04\x95", "the file is no archive of arrays"),
        ("graphs.npz", np.zeros(3), "the graph of round 1 is not a square matrix of weights"),
    ],
)
def test_a_run_with_a_damaged_file_is_named_and_not_drawn(tmp_path, file, content, told):
    make_run(tmp_path, "sound", 0.9, method="jgesr", seed=0)
    path = make_run(tmp_path, "harmed", 0.5, method="jgesr", seed=1) / file
    if isinstance(content, np.ndarray):
        np.savez(path, round_00001=content)
    else:
        path.write_bytes(path.read_bytes()[:-40] if content is None else content)
    found = collect([tmp_path], "accuracy/received")
    assert [run.name for run in found.runs] == ["sound"]
    (note,) = found.notes
    assert note.startswith(f"harmed: {file} ") and told in note
    # a table needs the summaries alone
    assert {run.name for run in collect([tmp_path]).runs} == {"sound", "harmed"}


def test_pictures_and_the_page_name_a_run_with_a_damaged_file(tmp_path, capsys):
    make_run(tmp_path, "sound", 0.9, method="jgesr", seed=0)
    (make_run(tmp_path, "harmed", 0.5, method="jgesr", seed=1) / "metrics.csv").write_text("")
    assert main([str(tmp_path), "--only", "graph_*"]) == 0
    captured = capsys.readouterr()
    assert "graph_jgesr_mnist_s_0.1.png" in captured.out
    assert captured.err.startswith("note: harmed: metrics.csv ") and captured.err.count("\n") == 1
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Results of 1 run<" in page and "harmed: " in page


def test_a_damaged_run_does_not_stand_in_for_an_older_sound_one(tmp_path):
    make_run(tmp_path, "older", 0.9)
    newer = make_run(tmp_path, "newer", 0.8)
    (newer / "graphs.npz").write_bytes(b"")
    os.utime(tmp_path / "older" / "summary.json", (1, 1))
    assert [run.name for run in collect([tmp_path], "accuracy/received").runs] == ["older"]


def test_means_and_differences_are_drawn_with_their_intervals(tmp_path):
    for seed, (a, b) in enumerate([(0.90, 0.95), (0.91, 0.955), (0.92, 0.97)]):
        make_run(tmp_path, f"a{seed}", a, method="fedavg", seed=seed, **PAPERS)
        make_run(tmp_path, f"b{seed}", b, method="jgesr", seed=seed, **PAPERS)
    found = names(tmp_path)
    means = [line.get_xydata() for line in found["means_mnist_s_0.1"].figure.axes[0].get_lines()]
    # fedavg: 91 +- 4.3027 * 1 / sqrt(3); then its mean; the paper's values last
    assert means[0].tolist() == [[pytest.approx(88.5159, abs=1e-3), 0], [pytest.approx(93.4841, abs=1e-3), 0]]
    assert means[1].tolist() == [[pytest.approx(91), 0]]
    assert means[-1].tolist() == [[90.48, 0], [95.17, 1]]
    drawn = [line.get_xydata() for line in found["differences_mnist_s_0.1"].figure.axes[0].get_lines()]
    assert any(line.tolist() == [[pytest.approx(-4.83333), 0]] for line in drawn)
    assert any(line[:, 0] == pytest.approx([-5.55044, -4.11622], abs=1e-4) for line in drawn if len(line) == 2)
    against = {d.name: d for d in draw(tables_of([tmp_path], "accuracy/received", "fedavg"))}
    assert "minus fedavg" in against["differences_mnist_s_0.1"].caption


@pytest.mark.parametrize(
    ("method", "kind"), [("two_step", "edge weight"), ("graph_filter", "edge weight"), ("fedamp", "mixing weight")]
)
def test_what_a_graph_holds_is_said_by_its_method(tmp_path, method, kind):
    make_run(tmp_path, "run", 0.9, method=method)
    assert f"{kind}s between clients" in names(tmp_path)[f"graph_{method}_mnist_s_0.1"].caption


def test_a_spread_over_clients_is_better_where_it_is_less(tmp_path):
    for seed in range(2):
        for method, spread in (("fedavg", 0.10 + 0.01 * seed), ("jgesr", 0.2)):
            folder = make_run(tmp_path, f"{method}{seed}", 0.9, method=method, seed=seed)
            change(folder, {"last.accuracy/received_std": spread})
    found = {d.name: d for d in draw(tables_of([tmp_path], "accuracy/received_std"))}
    assert "left of zero is better than jgesr" in found["differences_mnist_s_0.1"].caption
    (table,), _ = built([tmp_path], "accuracy/received_std")
    assert [label for (label, _), entry in table.entries.items() if entry.leads] == ["fedavg"]


def test_every_client_is_a_point_and_the_worst_is_named(tmp_path):
    for seed, values in enumerate([[0.9, 0.4, 1.0], [0.8, None, 0.7]]):
        folder = make_run(tmp_path, f"r{seed}", 0.9, method="fedavg", seed=seed)
        change(folder, clients={"accuracy/received": values})
    axes = names(tmp_path)["clients_mnist_s_0.1"].figure.axes[0]
    points = max(axes.get_lines(), key=lambda line: len(line.get_xdata())).get_xdata()
    assert sorted(points) == pytest.approx([40, 70, 80, 90, 100])
    assert [text.get_text() for text in axes.texts] == ["client 1, seed 0: 40 %"]


def test_the_network_draws_the_heaviest_edges_and_each_clients_classes():
    graph = np.array([[0, 1, 0.02], [1, 0, 0.5], [0.02, 0.5, 0]])  # the slightest is 2 % of the heaviest
    axes = graph_network(graph, [0, 1, 2], held=(["a", "b"], [[8, 0], [4, 4], [0, 0]])).axes[0]
    widths = sorted(line.get_linewidth() for line in axes.get_lines())
    assert widths == pytest.approx([0.4 + 1.6, 0.4 + 3.2])
    shares = sorted(round(p.theta2 - p.theta1) for p in axes.patches if p.width is None)
    assert shares == [180, 180, 360, 360]  # client 0 whole, client 1 in halves, client 2 empty
    assert graph_network(np.zeros((2, 2)), [0, 1]).axes[0].get_lines()[:] == []


def test_a_long_title_is_broken_into_lines_that_its_figure_holds():
    title = "jgesr (uniform, mu=0.001, groups=0.6, own=clean, memory=0.8), cifar10 s=0.1 missing=0.05, round 30"
    figure = graph_network(np.ones((3, 3)) - np.eye(3), range(3), title)
    figure.draw_without_rendering()
    head = figure.texts[0]
    assert head.get_text().split() == title.split()
    assert figure.bbox.contains(*head.get_window_extent().p0)
    assert figure.bbox.contains(*head.get_window_extent().p1)


def test_a_caption_says_where_curves_begin(tmp_path):
    make_run(tmp_path, "a", 0.90, method="fedavg", rounds=10)
    assert "after each round (0: before training)." in names(tmp_path)["rounds_mnist_s_0.1"].caption
    assert "after each round. One seed." in names(tmp_path, "accuracy/trained")["rounds_mnist_s_0.1"].caption
    rows = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    (tmp_path / "a" / "metrics.csv").write_text("\n".join([rows[0], *(rows[1 + n] for n in (5, 10))]) + "\n")
    caption = names(tmp_path, "accuracy/trained")["rounds_mnist_s_0.1"].caption
    assert "after each round measured, from round 5 on." in caption


def test_missing_rates_have_bands_over_seeds(tmp_path):
    for seed, rate in itertools.product(range(3), (0.0, 0.05, 0.1)):
        make_run(tmp_path, f"{rate}_{seed}", 0.9 - rate + 0.01 * seed, seed=seed, missing=rate)
    (band,) = names(tmp_path)["missing_mnist_s_0.1"].figure.axes[0].collections
    low, high = band.get_paths()[0].get_extents().intervaly
    assert (low, high) == (pytest.approx(80), pytest.approx(92))  # means 81, 86, 91, deviation 1


def test_captions_say_over_how_many_seeds_and_what_bars_and_bands_are(tmp_path):
    for method, seeds in (("fedavg", 3), ("jgesr", 3), ("cfl", 1)):
        for seed, rate in itertools.product(range(seeds), (0.0, 0.1)):
            make_run(tmp_path, f"{method}{rate}_{seed}", 0.8 + 0.01 * seed, method=method, seed=seed, missing=rate)
    found = names(tmp_path)
    assert found["means_mnist_s_0.1"].caption.startswith(
        "mnist s=0.1: local test accuracy of the model each client receives from the server, plain mean over clients, "
        "after the last round, mean over 1 to 3 seeds; bars: 95 % confidence intervals of it (Student's t), cut at 0 "
        "and 100 %; of one seed there is none"
    )
    spread = (
        "Lines: mean over 1 to 3 seeds; bands: one sample standard deviation to either side, cut at 0 and 100 %; "
        "of one seed there is none."
    )
    assert all(found[f"{kind}_mnist_s_0.1"].caption.endswith(spread) for kind in ("rounds", "missing"))
    bands = {line.get_label() for line in found["rounds_mnist_s_0.1"].figure.axes[0].collections}
    assert len(bands) == 2


def test_the_reference_may_be_named_as_the_study_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, stem: [figure.get_suptitle()])
    (tmp_path / "figures").mkdir()
    (tmp_path / "study.yaml").write_text("methods: {local: {}, mean: {name: fedavg}, jgesr: {}}\n")
    for (name, method), seed in itertools.product((("mean", "fedavg"), ("jgesr", "jgesr")), (0, 1)):
        make_run(tmp_path, f"mnist_s0.1_{name}_seed{seed}", 0.5 + 0.1 * seed, method=method, seed=seed)
    assert main([str(tmp_path), "--reference", "mean", "--only", "differences_*"]) == 0
    assert capsys.readouterr().out.splitlines() == ["mnist s=0.1: minus mean", f"{tmp_path}/figures/captions.txt"]


def test_only_the_figures_asked_for_are_drawn(tmp_path, capsys):
    make_run(tmp_path, "a", 0.9, method="jgesr")
    assert main([str(tmp_path), "--only", "rounds_*", "--only", "objective*"]) == 0
    written = sorted(path.name for path in (tmp_path / "figures").glob("*.png"))
    assert written == ["objective_mnist_s_0.1.png", "rounds_mnist_s_0.1.png"]
    with pytest.raises(ConfigError, match="--only round matches none of the"):
        main([str(tmp_path), "--only", "round"])


def test_of_a_dense_network_the_strongest_edges_are_drawn_and_the_picture_says_so():
    generator = np.random.default_rng(0)
    weights = np.triu(generator.uniform(0.5, 1, (20, 20)), 1)
    axes = graph_network(weights + weights.T, range(20)).axes[0]
    assert len(axes.get_lines()) == 60
    heaviest = np.sort(weights[weights > 0])[::-1]
    share = heaviest[:60].sum() / heaviest.sum()
    assert axes.texts[0].get_text() == f"the 60 strongest of 190 edges: {share:.0%} of the weight"
    assert not any("strongest" in text.get_text() for text in graph_network([[0, 1], [1, 0]], [0, 1]).axes[0].texts)


def test_figures_call_methods_as_the_study_does_and_keep_their_looks(tmp_path):
    named_study(tmp_path / "runs")
    for folder in (tmp_path / "runs").iterdir():
        if folder.is_dir():
            change(folder, clients={"accuracy/received": [0.5, 0.9]})
    found = names(tmp_path / "runs")
    called = {"my method", "ours", "jgesr (uniform)"}
    curves = found["rounds_mnist_s_0.1"].figure.axes[0].get_lines()
    colours = {line.get_label(): line.get_color() for line in curves}
    assert colours.keys() == called and colours["my method"] == plots.STYLES["fedavg"][0]
    for kind in ("means", "clients"):
        axes = found[f"{kind}_mnist_s_0.1"].figure.axes[0]
        assert {tick.get_text() for tick in axes.get_yticklabels()} == called
    assert "minus jgesr (uniform)" not in found["differences_mnist_s_0.1"].caption
    assert found["graph_TrimMom_momentum_0.5_mnist_s_0.1"].caption.startswith("ours, mnist s=0.1, round 2")
    objective = found["objective_mnist_s_0.1"].figure.axes[0]
    assert {line.get_label() for line in objective.get_lines()} == called
    assert report.main([str(tmp_path / "runs")]) == 0
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert main([str(tmp_path / "runs"), "--only", "means*"]) == 0
    captions = (tmp_path / "runs" / "figures" / "captions.txt").read_text(encoding="utf-8")
    assert captions.endswith("\n\nCalled as in the study's file: my method: fedavg; ours: TrimMom (momentum=0.5).\n")
    assert re.search(r"<text[^>]*>ours<", page) and "ours: TrimMom (momentum=0.5)" in page


def test_captions_say_what_tells_blocks_of_runs_apart(tmp_path):
    for down in (0.0, 0.2):
        folder = make_run(tmp_path, f"down{down}", 0.9, method="fedavg")
        change(folder, **{"config.downlink": {"noise": down, "missing_rate": 0.0}})
    found = names(tmp_path)
    captions = sorted(drawing.caption for name, drawing in found.items() if name.startswith("rounds_mnist"))
    assert [caption.rpartition("; with ")[2] for caption in captions] == ["downlink.noise=0.0", "downlink.noise=0.2"]
