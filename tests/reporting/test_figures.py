import base64
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting import report
from jgesr_lightning.reporting.figures import draw, main
from jgesr_lightning.reporting.runs import collect
from tests.reporting.synthetic import make_run


def names(root, metric="accuracy/received"):
    return {drawing.name: drawing for drawing in draw(collect([root]).runs, metric)}


def lines(drawing):
    found = drawing.figure.axes[0].get_lines()
    return {line.get_label(): line.get_xydata().tolist() for line in found if not line.get_label().startswith("_")}


def test_curves_are_means_over_seeds(tmp_path):
    make_run(tmp_path, "a", 0.90, method="fedavg", seed=0)
    make_run(tmp_path, "b", 0.96, method="fedavg", seed=1)
    drawing = names(tmp_path)["rounds_mnist_s_0.1"]
    assert lines(drawing)["fedavg"] == [[0, pytest.approx(31)], [1, pytest.approx(62)], [2, pytest.approx(93)]]
    assert "plain mean over clients" in drawing.caption
    assert "standard deviation over seeds" in drawing.caption
    # before training there is no trained model
    assert lines(names(tmp_path, "accuracy/trained")["rounds_mnist_s_0.1"])["fedavg"][0][0] == 1


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


def test_the_objective_of_the_last_aggregation(tmp_path):
    make_run(tmp_path, "a", 0.9, method="jgesr")
    assert [x for x, _ in lines(names(tmp_path)["objective_mnist_s_0.1"])["jgesr"]] == [0, 1, 2]


def test_summaries_alone_still_give_what_they_can(tmp_path):
    make_run(tmp_path, "a", 0.9, method="jgesr", with_files=False)
    assert set(names(tmp_path)) == {"objective_mnist_s_0.1"}


def test_command_writes_png_and_svg(tmp_path, capsys):
    make_run(tmp_path, "a", 0.9, method="jgesr")
    make_run(tmp_path, "lost", 0.9, status="failed")
    assert main([str(tmp_path)]) == 0
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert "rounds_mnist_s_0.1.png" in written
    assert "rounds_mnist_s_0.1.svg" in written
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in written)
    assert "lost: failed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="accuracies"):
        main([str(tmp_path), "--metric", "loss/train"])


class _Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_report_is_one_whole_page(tmp_path):
    for seed in range(2):
        make_run(tmp_path, f"jgesr_{seed}", 0.95 + seed / 100, method="jgesr", seed=seed)
        make_run(tmp_path, f"fedavg_{seed}", 0.9, method="fedavg", seed=seed)
    make_run(tmp_path, "a<b>&c", 0.9, status="failed")
    assert report.main([str(tmp_path)]) == 0
    page = _Page()
    page.feed((tmp_path / "report.html").read_text())
    assert not page.open
    text = " ".join(page.text)
    for word in ("95.50 ± 0.71", "90.48", "a<b>&c: failed", "percentage points", "Left out", "4 runs"):
        assert word in text
    assert len(page.sources) == 3  # curves, one graph, one objective
    for source in page.sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")


def _cut(path):
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("metrics.csv", lambda path: path.write_bytes(b"round,accuracy/received\n0,0.1\xff\n")),
        ("metrics.csv", lambda path: path.write_text("round,accuracy/received\nx,0.1\n")),
        ("metrics.csv", lambda path: path.write_text("round,accuracy/received\n0,0.1\n1")),
        ("metrics.csv", lambda path: path.write_text("")),
        ("partition.csv", lambda path: path.write_text("")),
        ("partition.csv", lambda path: path.write_text("client,train,test,zero,one\n0,6,2,8,0\n1,6,2,4")),
        ("partition.csv", lambda path: path.write_text("client,train,test,zero,one\n0,6,2,8,0\n")),
        ("partition.csv", lambda path: path.write_text("client,train,test,zero,one\n0,6,2,8,nan\n")),
        ("graphs.npz", _cut),
        ("graphs.npz", lambda path: path.write_bytes(b"")),
        ("graphs.npz", lambda path: np.savez(path, round_00001=np.zeros(3))),
    ],
)
def test_a_run_with_a_damaged_file_is_named_and_the_others_are_drawn(tmp_path, capsys, file, harm):
    make_run(tmp_path, "sound", 0.9, method="jgesr", seed=0)
    harm(make_run(tmp_path, "harmed", 0.5, method="jgesr", seed=1) / file)
    assert main([str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "graph_jgesr_mnist_s_0.1.png" in captured.out
    assert captured.err.startswith("note: harmed: ") and file in captured.err and captured.err.count("\n") == 1
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Results of 1 runs" in page and "harmed: " in page
    # a table needs the summaries alone
    assert {run.name for run in collect([tmp_path]).runs} == {"sound", "harmed"}


def test_a_damaged_run_does_not_stand_in_for_an_older_sound_one(tmp_path):
    make_run(tmp_path, "older", 0.9)
    newer = make_run(tmp_path, "newer", 0.8)
    (newer / "graphs.npz").write_bytes(b"")
    os.utime(tmp_path / "older" / "summary.json", (1, 1))
    assert [run.name for run in collect([tmp_path], "accuracy/received").runs] == ["older"]
