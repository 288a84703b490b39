import gc
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.reporting import plots
from jgesr_lightning.reporting.plots import Series

BLOCKS = np.kron(np.eye(3), np.ones((2, 2)))
LOOKS = plots.looks(plots.STYLES)


def drawn_lines(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}


def test_clusters_become_neighbours():
    shuffled = [3, 0, 4, 1, 5, 2]
    graph = BLOCKS[np.ix_(shuffled, shuffled)]
    order = plots.cluster_order(graph)
    assert np.array_equal(graph[np.ix_(order, order)], BLOCKS)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_an_order_names_every_client_once(count, seed):
    graph = np.random.default_rng(seed).random((count, count))
    assert sorted(plots.cluster_order(graph)) == list(range(count))


def test_a_graph_is_drawn_in_the_given_order_and_its_scale_starts_at_zero():
    graph = np.array([[0, 0.2, 0.5], [0.2, 0, 0.1], [0.5, 0.1, 0]])
    figure = plots.graph_heatmap(graph, [2, 0, 1], label="mixing weight")
    image = figure.axes[0].images[0]
    assert np.array_equal(image.get_array(), graph[np.ix_([2, 0, 1], [2, 0, 1])])
    assert image.get_clim() == (0, 0.5)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["2", "0", "1"]
    assert figure.axes[1].get_ylabel() == "mixing weight"


@pytest.mark.parametrize("graph", [np.zeros((4, 4)), np.full((2, 2), np.nan), np.zeros((1, 1))])
def test_graphs_without_edges_can_be_drawn(graph):
    assert plots.to_pixels(plots.graph_heatmap(graph, plots.cluster_order(graph)), dpi=30).shape[-1] == 3


def test_bars_show_shares_in_the_order_of_the_graph():
    counts = np.array([[3, 1], [0, 0], [0, 5]])
    figure = plots.graph_heatmap(np.zeros((3, 3)), [2, 0, 1], held=(["cat", "dog"], counts))
    bars = {(round(bar.get_y() + 0.41), bar.get_x()): bar.get_width() for bar in figure.axes[1].patches}
    assert bars == {(0, 0.0): 1.0, (1, 0.0): 0.75, (1, 0.75): 0.25}
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["cat", "dog"]


def test_accuracies_are_in_percent_and_gaps_are_left_out():
    figure = plots.accuracy_per_round(
        [Series("fedavg", [0, 1, 2], [0.1, float("nan"), 0.9], [0.0, 0.0, 0.1]), Series("jgesr", [0, 2], [0.1, 0.95])],
        LOOKS,
        "received accuracy (%)",
    )
    lines = drawn_lines(figure)
    assert lines["fedavg"].get_xydata().tolist() == [[0, 10], [2, 90]]
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["jgesr", "fedavg"]  # as the lines end, the best on top
    assert len(figure.axes[0].collections) == 1  # one band; a single run has none


def test_methods_can_be_told_apart_without_colour():
    looks = [(style[1], style[2]) for style in plots.STYLES.values()]
    assert len({str(look) for look in looks}) == len(looks)
    assert len({marker for _, marker in looks[:8]}) >= 7


def test_a_method_without_a_style_of_its_own_takes_that_of_no_other(monkeypatch):
    labels = ["fedavg", "Own", *(f"jgesr (alpha={place})" for place in range(60)), *plots.STYLES]
    looks = plots.looks(labels)
    named = {style[0] for style in plots.STYLES.values()}
    assert not named & {look["color"] for label, look in looks.items() if label not in plots.STYLES}
    assert [looks[label]["color"] for label in plots.STYLES] == [style[0] for style in plots.STYLES.values()]
    assert len({str(look) for look in looks.values()}) == len(looks)
    assert len({style[0] for style in plots._OTHERS}) == len(plots._OTHERS)
    assert {style[0] for style in plots._OTHERS} <= plots.DARK.keys()


def test_bands_and_axis_end_where_accuracies_do():
    series = [Series("jgesr", [1, 2], [0.97, 1.0], [0.05, 0.02]), Series("fedavg", [1, 2], [0.02, 0.5], [0.1, 0.1])]
    for figure in (plots.accuracy_per_round(series, LOOKS, "y"), plots.accuracy_against(series, LOOKS, "s", "y")):
        axes = figure.axes[0]
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] == 100
        reached = np.concatenate([band.get_paths()[0].vertices[:, 1] for band in axes.collections])
        assert reached.min() == 0 and reached.max() == 100


def test_no_two_of_many_variants_look_the_same():
    labels = ["jgesr (alpha=0.1)", *plots.STYLES, *(f"jgesr (gamma={place})" for place in range(30))]
    styles = plots.looks(labels)
    for figure in (
        plots.accuracy_per_round([Series(label, [0, 1], [0.1, 0.9]) for label in labels], styles, "accuracy (%)"),
        plots.objective_trace([Series(label, [0, 1], [2.0, 1.0]) for label in labels], styles),
    ):
        looks = [str((line.get_linestyle(), line._unscaled_dash_pattern, line.get_marker(), line.get_color()))
                 for line in drawn_lines(figure).values()]  # fmt: skip
        assert len(set(looks)) == len(labels)


def test_the_objective_is_drawn_above_its_smallest_value():
    figure = plots.objective_trace([Series("jgesr", [0, 1, 2], [5.0, 3.0, 2.0])], LOOKS)
    assert drawn_lines(figure)["jgesr"].get_xydata().tolist() == [[0, 3], [1, 1]]
    assert figure.axes[0].get_yscale() == "log"


def test_a_logarithmic_axis_names_the_measured_values():
    series = [Series("local", [0.1, 0.5, 2], [0.9, 0.8, 0.7])]
    figure = plots.accuracy_against(series, LOOKS, "s", "y", logarithmic=True)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["0.1", "0.5", "2"]


def test_files_are_whole_and_equal_for_equal_numbers(tmp_path):
    first, second = (plots.save(plots.graph_heatmap(BLOCKS, range(6)), tmp_path / name / "graph") for name in "ab")
    assert [path.name for path in first] == ["graph.png", "graph.svg", "graph.pdf"]
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True)] == [True] * 3
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert ElementTree.fromstring(first[1].read_bytes()).tag.endswith("svg")


def test_nothing_is_left_behind():
    before = dict(mpl.rcParams)
    for _ in range(3):
        plots.to_pixels(plots.graph_heatmap(BLOCKS, range(6)), dpi=30)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "Figure"]
    assert dict(mpl.rcParams) == before


def test_one_line_alone_is_named_too():
    figure = plots.accuracy_per_round([Series("jgesr", [0, 1], [0.1, 0.9])], LOOKS, "received accuracy (%)")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["jgesr"]
