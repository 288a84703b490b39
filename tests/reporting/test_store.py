import gzip
import json

import numpy as np
import pytest
from PIL import Image

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting import figures, report
from jgesr_lightning.reporting.render import csv_text
from jgesr_lightning.reporting.store import store
from jgesr_lightning.reporting.table import main
from jgesr_lightning.reporting.tables import tables_of
from tests.reporting.synthetic import built, change, make_run


def study(root):
    for seed in range(3):
        for method, accuracy in (("fedavg", 0.9), ("jgesr", 0.95)):
            folder = make_run(root, f"{method}_{seed}", accuracy * (1 + seed / 300), method=method, seed=seed)
            remarks = [{"kind": "diverged", "rounds": [1], "text": "J rose"}] if seed == 1 else []
            change(folder, clients={"accuracy/received": [1 / 3, 2 / 7, 0.9]}, remarks=remarks)


@pytest.mark.parametrize("name", ["results.json", "results.json.gz"])
def test_tables_pictures_and_pages_are_those_of_the_folders(tmp_path, capsys, name):
    study(tmp_path / "runs")
    file = tmp_path / "stored" / name
    assert main([str(tmp_path / "runs"), "--store", str(file)]) == 0
    assert capsys.readouterr().out == f"wrote {file}: 6 runs\n"
    assert csv_text(built([file])[0]) == csv_text(built([tmp_path / "runs"])[0])
    for source, target in ((tmp_path / "runs", "a"), (file, "b")):
        assert figures.main([str(source), "--out", str(tmp_path / target)]) == 0
    drawn = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert drawn == sorted(path.name for path in (tmp_path / "b").iterdir()) and len(drawn) >= 14
    for picture in drawn:
        if picture.endswith(".png"):
            a, b = (np.asarray(Image.open(tmp_path / folder / picture), dtype=int) for folder in "ab")
            assert a.shape == b.shape and abs(a - b).max() <= 8, picture  # curves are stored to six digits
    assert report.main([str(file)]) == 0
    page = tmp_path / "stored" / "results_report.html"
    assert "jgesr has the best mean" in page.read_text()


def test_equal_runs_give_equal_bytes(tmp_path):
    study(tmp_path / "runs")
    _, collection = built([tmp_path / "runs"])
    for name in ("a.json.gz", "b.json.gz"):
        store(collection, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert len(gzip.decompress((tmp_path / "a.json.gz").read_bytes()).splitlines()) == 8  # a line a run


def test_what_is_stored_can_be_stored_again(tmp_path):
    study(tmp_path / "runs")
    store(built([tmp_path / "runs"])[1], tmp_path / "a.json")
    store(built([tmp_path / "a.json"])[1], tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_long_trace_is_thinned_and_drawn_where_it_was(tmp_path):
    folder = make_run(tmp_path / "runs", "a", 0.9)
    change(folder, {"aggregation.objective": [1 / (1 + k) for k in range(10_000)]})
    store(built([tmp_path / "runs"])[1], tmp_path / "a.json")
    assert (tmp_path / "a.json").stat().st_size < 20_000
    (run,) = built([tmp_path / "a.json"])[1].runs
    places, trace = run.summary["aggregation"]["objective_at"], run.summary["aggregation"]["objective"]
    assert len(places) == len(trace) <= 400 and places[0] == 0 and places[-1] == 9999
    assert trace == pytest.approx([1 / (1 + k) for k in places])
    (drawing,) = [d for d in figures.draw(tables_of([tmp_path / "a.json"])) if d.name.startswith("objective")]
    drawn = drawing.figure.axes[0].get_lines()[0].get_xdata()
    assert set(drawn) <= set(places) and drawn[-1] > 9000  # the smallest value itself is not drawn


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "{}", '{"format": "jgesr_lightning results", "version": 9}', "\x1f\x8b\x00", "[" * 99_999],
)
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        built([path])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("runs", [None, 5, {"a": 1}])
def test_a_file_whose_runs_are_no_list_is_refused_in_one_line(tmp_path, runs):
    study(tmp_path / "runs")
    store(built([tmp_path / "runs"])[1], tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(content | {"runs": runs}))
    with pytest.raises(ConfigError, match=r"a\.json cannot be read as stored results \(its runs are .*, no list\)"):
        built([tmp_path / "a.json"])


@pytest.mark.parametrize("row", [None, [], {"name": "x"}, {"name": "x", "settings": {}, "summary": {"last": 3}}])
def test_a_damaged_row_is_left_out_by_name(tmp_path, row):
    study(tmp_path / "runs")
    store(built([tmp_path / "runs"])[1], tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    content["runs"].append(row)
    (tmp_path / "a.json").write_text(json.dumps(content))
    (table,), collection = built([tmp_path / "a.json"])
    assert len(collection.runs) == 6 and table.rows == ["fedavg", "jgesr"]
    (note,) = collection.notes
    assert note.endswith("left out") and ("x" in note or "run 7" in note)


def test_a_damaged_curve_or_graph_is_named_too(tmp_path):
    study(tmp_path / "runs")
    store(built([tmp_path / "runs"])[1], tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    content["runs"][0]["graph"] = {"round": 2, "weights": [[1, 2]]}
    content["runs"][1]["curves"] = {"round": [0, 1], "accuracy/received": [0.5]}
    content["runs"][2]["classes"] = 7
    (tmp_path / "a.json").write_text(json.dumps(content))
    _, collection = built([tmp_path / "a.json"], drawn=True)
    assert len(collection.runs) == 3 and len(collection.notes) == 3
    assert np.isfinite(collection.runs[0].last("accuracy/received"))


def test_a_run_with_any_damaged_curve_is_left_out_of_what_is_stored(tmp_path, capsys):
    study(tmp_path / "runs")
    path = tmp_path / "runs" / "jgesr_0" / "metrics.csv"
    path.write_text(path.read_text() + "3,abc,0.5\n")  # accuracy/received is not what the tables lead with
    arguments = ["--metric", "accuracy/trained", "--store", str(tmp_path / "a.json")]
    assert main([str(tmp_path / "runs"), *arguments]) == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert len(content["runs"]) == 5
    assert "jgesr_0: metrics.csv cannot be read (ValueError: could not convert" in capsys.readouterr().err
    content["runs"][0]["curves"]["accuracy/received"].pop()
    for row, curves in zip(content["runs"][1:], ([1], 5, None), strict=False):
        row["curves"] = curves
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert main([str(tmp_path / "a.json"), *arguments[:3], str(tmp_path / "b.json")]) == 0
    assert [row["name"] for row in json.loads((tmp_path / "b.json").read_text())["runs"]] == ["jgesr_2"]
    told = capsys.readouterr().err
    assert "fedavg_0: metrics.csv cannot be read (ValueError: accuracy/received has 2 values for 3 rounds)" in told
    assert told.count("left out") == 4


def test_what_is_stored_is_written_as_tables_too_where_asked(tmp_path, capsys):
    study(tmp_path / "runs")
    file, out = tmp_path / "a.json", tmp_path / "out"
    assert main([str(tmp_path / "runs"), "--store", str(file), "--out", str(out), "--format", "csv"]) == 0
    assert capsys.readouterr().out == f"wrote {file}: 6 runs\nwrote {out / 'table.csv'}\n"
    assert (out / "table.csv").read_text() == csv_text(built([file])[0])


@pytest.mark.parametrize("name", ["study.yaml", "a", "a.json.bak", "a.gz"])
def test_a_name_that_is_not_of_stored_results_is_refused_before_anything_is_read(tmp_path, name):
    mine = tmp_path / name
    mine.write_text("methods: {fedavg: {}}\n")
    for there in (True, False):
        with pytest.raises(ConfigError, match=r"does not end with \.json or \.json\.gz") as caught:
            main([str(tmp_path / "no runs"), "--store", str(mine)])
        assert "\n" not in str(caught.value)
        assert not there or mine.read_text() == "methods: {fedavg: {}}\n"
        mine.unlink(missing_ok=True)
    assert not mine.exists()


@pytest.mark.parametrize("content", [b"", b'{"clients": 3}', b"[1]", b"\x1f\x8b\x00", b"methods: {}"])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_file_of_something_else_is_not_replaced(tmp_path, name, content):
    study(tmp_path / "runs")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="is there and holds no stored results; name another file") as caught:
        main([str(tmp_path / "runs"), "--store", str(tmp_path / name)])
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_stored_results_are_replaced(tmp_path, name):
    study(tmp_path / "runs")
    for count in (6, 7):
        assert main([str(tmp_path / "runs"), "--store", str(tmp_path / name)]) == 0
        assert len(built([tmp_path / name])[1].runs) == count
        make_run(tmp_path / "runs", "more", 0.9, method="jgesr", seed=7) if count == 6 else None


def test_a_format_without_a_table_to_write_is_refused_and_nothing_stored(tmp_path):
    study(tmp_path / "runs")
    with pytest.raises(ConfigError, match="give --out DIR"):
        main([str(tmp_path / "runs"), "--store", str(tmp_path / "a.json"), "--format", "latex"])
    assert not (tmp_path / "a.json").exists()
