"""Folders and files that nobody means to have: none stops a table, a picture or a page; what is left out is named."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from jgesr_lightning.reporting import figures, report
from jgesr_lightning.reporting.collection import collect
from jgesr_lightning.reporting.render import latex, markdown
from jgesr_lightning.reporting.sources import Folder
from jgesr_lightning.reporting.table import main
from jgesr_lightning.reporting.tables import tables_of
from tests.reporting.synthetic import built, change, make_run


def outputs(root, capsys):
    """Make everything there is of a folder; return what was printed and written as text."""
    assert main([str(root), "--format", "all"]) == 0
    assert figures.main([str(root), "--out", str(root / "pictures")]) == 0
    assert report.main([str(root), "--out", str(root / "page.html")]) == 0
    captured = capsys.readouterr()
    return captured.out + captured.err, (root / "page.html").read_text(encoding="utf-8")


NAMES = (b"caf\xe9", b"a\nb", b"$x^2$", b"a|b<i>", b"\\input{x}%", b"-rf", b"\xe2\x80\xaeevil", b"a b", b"~")


def test_any_name_of_a_folder(tmp_path, capsys):
    for seed, name in enumerate(NAMES):
        make_run(tmp_path, os.fsdecode(name), 0.8, seed=seed)
        make_run(tmp_path, os.fsdecode(b"lost " + name), 0.8, status="failed")
    printed, page = outputs(tmp_path, capsys)
    assert "<i>" not in page
    assert "\u202e" not in printed + page
    (table,), collection = built([tmp_path])
    assert [entry.value.n for entry in table.entries.values()] == [len(NAMES)]
    assert len(collection.notes) == len(NAMES) and all(note.isprintable() for note in collection.notes)


EVIL = "a\n\\input{x} $y$ | <b>&_^~#%{\u202e}"


def test_any_text_in_labels_and_reasons(tmp_path, capsys):
    make_run(tmp_path, "one", 0.9, variant=EVIL)
    make_run(tmp_path, "two", 0.8, data=EVIL)
    change(make_run(tmp_path, "lost", 0.8, status="failed"), reason=EVIL)
    _, page = outputs(tmp_path, capsys)
    assert "<b>" not in page
    tables, collection = built([tmp_path])
    for table in tables:
        rows = [line for line in markdown(table).splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[:3]}) == 1
        assert not re.search(r"(?<!\\)[<`]", markdown(table))
        lines = [line for line in latex(table).splitlines() if not line.startswith("%")]
        assert not any("\\input" in line for line in lines)
        for line in lines:
            if "variant" in line:
                assert r"\textbackslash{}n\textbackslash{}input\{x\} \$y\$" in line
                assert r"\textbar{} \textless{}b\textgreater{}\&\_\textasciicircum{}\textasciitilde{}\#\%\{" in line
    assert all(note.isprintable() for note in collection.notes)


DAMAGED = [
    ("[]", "holds no summary"),
    ("null", "holds no summary"),
    ('{"status": "finished"}', "lacks 'config'"),
    ('{"status": "finished", "config": {"seed": 1}, "last": {"round": 1}}', "has format None"),
    ('{"status": "finished", "schema": 1, "last": {"round": 1}}', "lacks 'config'"),
    ('{"status": "stopped", "schema": 1}', "stopped after round None of None"),
    ('{"status": ["a"], "schema": 1, "reason": {}}', "has no status"),
    ("[" * 100_000, "cannot be read"),
    ('{"status": "finished", "schema": 1, "last": []}', "lacks 'config'"),
    ('{"status": "finished", "schema": 1, "last": [], "config": {"seed": 1}}', "lacks 'last'"),
    ('"' + "\\ud800" * 5 + '"', "holds no summary"),
    ("", "cannot be read"),
]


def test_summaries_that_are_none_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "LIMIT", 0)  # no pictures, which take their time
    make_run(tmp_path, "sound", 0.9)
    for place, (content, _) in enumerate(DAMAGED):
        (make_run(tmp_path, f"harmed{place:02}", 0.8, seed=1) / "summary.json").write_text(content)
    assert main([str(tmp_path)]) == 0
    assert report.main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text(encoding="utf-8")
    notes = collect([tmp_path]).notes
    assert len(notes) == len(DAMAGED)
    for place, (note, (_, reason)) in enumerate(zip(notes, DAMAGED, strict=True)):
        assert note.startswith(f"harmed{place:02}: ") and reason in note and len(note) < 400 and note.isprintable()
        assert f"harmed{place:02}: " in page and note in printed


def test_settings_that_differ_by_rounding_are_one_row_and_one_column(tmp_path):
    make_run(tmp_path, "a", 0.90, alpha=0.3, noise=0.3, seed=0)
    make_run(tmp_path, "b", 0.92, alpha=0.1 + 0.2, noise=0.1 + 0.2, seed=0)
    make_run(tmp_path, "c", 0.95, alpha=0.1 + 0.2, noise=0.3, seed=1)
    (table,), collection = built([tmp_path])
    assert list(table.entries) == [("jgesr (alpha=0.3)", ("mnist", 0.3, 0.0))]
    (entry,) = table.entries.values()
    assert entry.value.n == 2  # a and b are one seed, neither is dropped: (91 + 95) / 2
    assert entry.value.mean == pytest.approx(93)
    assert len(collection.runs) == 3
    (note,) = collection.notes
    assert note.startswith("b: same seed as a, and settings that differ by rounding only")
    drawn = [drawing.name for drawing in figures.draw(tables_of([tmp_path]))]
    assert [name for name in drawn if name.startswith("rounds")] == ["rounds_mnist_s_0.3"]


def test_settings_that_differ_are_not_one_row(tmp_path):
    make_run(tmp_path, "a", 0.90, alpha=0.1234567)
    make_run(tmp_path, "b", 0.92, alpha=0.1234568)
    (table,), collection = built([tmp_path])
    assert len(table.rows) == 2 and not collection.notes


@pytest.mark.parametrize("labels", [("x/y", "x_y", "X/Y"), ("x" * 250, f"{'x' * 250}y", f"{'x' * 250}z")])
def test_pictures_of_different_labels_have_different_names_that_file_systems_take(tmp_path, labels):
    for number, label in enumerate(labels):
        make_run(tmp_path, f"run{number}", 0.9, variant=label)
    names = [drawing.name for drawing in figures.draw(tables_of([tmp_path]))]
    assert len({name.lower() for name in names}) == len(names) and max(map(len, names)) < 250
    assert sum("graph_" in name for name in names) == 3


def test_links_are_followed_once_and_loops_end(tmp_path):
    scratch = make_run(tmp_path / "scratch", "far", 0.9)
    runs = tmp_path / "runs"
    make_run(runs, "near", 0.8, seed=1)
    (runs / "linked").symlink_to(scratch)
    (runs / "linked twice").symlink_to(scratch)
    (runs / "up").symlink_to(tmp_path)
    (runs / "self").symlink_to(runs)
    (runs / "group").mkdir()
    (runs / "group" / "loop").symlink_to(runs / "group")
    (runs / "gone").symlink_to(tmp_path / "nowhere")
    collection = collect([runs])
    assert [run.name for run in collection.runs] == ["linked", "near"]
    assert collection.notes == ["gone: a link to a place that is not there; left out"]
    (tmp_path / "root").symlink_to(runs)
    assert len(collect([tmp_path / "root", runs]).runs) == 2


def test_a_page_that_fails_leaves_the_former_one(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "LIMIT", 0)
    make_run(tmp_path, "a", 0.9)
    assert report.main([str(tmp_path)]) == 0
    before = (tmp_path / "report.html").read_bytes()
    monkeypatch.setattr("jgesr_lightning.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        report.main([str(tmp_path)])
    assert (tmp_path / "report.html").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no such thing", "tkagg"])
def test_pictures_are_drawn_whatever_the_environment_names(tmp_path, backend):
    make_run(tmp_path, "a", 0.9)
    done = subprocess.run(
        [sys.executable, "-m", "jgesr_lightning", "figures", str(tmp_path)],
        env=os.environ | {"MPLBACKEND": backend},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "rounds_mnist_s_0.1.png" in done.stdout
    imported = "import os; from jgesr_lightning.reporting import plots; print(os.environ['MPLBACKEND'])"
    done = subprocess.run(
        [sys.executable, "-c", imported], env=os.environ | {"MPLBACKEND": backend}, capture_output=True, text=True
    )
    assert done.stdout.strip() == backend, done.stderr  # nobody else's environment is changed


def test_the_last_graph_is_that_of_the_last_round_beyond_five_digits(tmp_path):
    np.savez(tmp_path / "graphs.npz", round_99999=np.zeros((2, 2)), round_100000=np.eye(2))
    number, graph = Folder(tmp_path).last_graph()
    assert number == 100_000 and (graph == np.eye(2)).all()
