import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting import report
from jgesr_lightning.reporting.options import beside
from jgesr_lightning.reporting.tables import tables_of
from jgesr_lightning.reporting.words import reading, summary
from tests.reporting.synthetic import PAPERS, change, make_run

VOID = ("meta", "img", "br")


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what a page links to or would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.sources, self.text = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if tag == "a" and name == "href"]
        self.sources += [
            value for name, value in attributes if name in ("src", "xlink:href") or "url(" in (value or "")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def study(root):
    """jgesr ahead of fedavg by 5, 4.5 and 5 points, and of local by 1, -1 and 0.5."""
    for seed, (fedavg, local, jgesr) in enumerate([(0.90, 0.94, 0.95), (0.91, 0.965, 0.955), (0.92, 0.965, 0.97)]):
        for method, accuracy in (("fedavg", fedavg), ("local", local), ("jgesr", jgesr)):
            folder = make_run(root, f"{method}_{seed}", accuracy, method=method, seed=seed, **PAPERS)
            change(folder, clients={"accuracy/received": [accuracy, accuracy - 0.1, min(1.0, accuracy + 0.1)]})


def made(root, *arguments):
    assert report.main([str(root), *arguments]) == 0
    return (root / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without pictures, which take their time."""
    monkeypatch.setattr(report, "LIMIT", 0)


def test_the_page_is_whole_and_fetches_nothing(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "a<b>&c", 0.9, status="failed")
    text = made(tmp_path)
    page = Page(text)
    words = " ".join(page.text)
    for word in ("95.83 ± 1.04", "90.48", "a<b>&c: failed", "percentage points", "Left out", "9 runs", "\u22124.83"):
        assert word in words
    assert all(source.startswith(("#", "data:image/png;base64,")) or "url(#" in source for source in page.sources)
    assert text.count("<svg ") == 3 + 2 + 2  # means, differences, clients; curves, objective; matrix and network
    assert "@media (prefers-color-scheme: dark)" in text
    assert not re.search(r"font(-size)?: ?[0-7](\\.\\d+)?px", text)  # of 96 / 72 pixels each
    assert min(float(size) for size in re.findall(r"font(?:-size)?: ?([0-9.]+)px", text)) * 96 / 72 >= 11
    defined = set(re.findall(r"(--c[0-9a-f]{6}):", text))
    assert set(re.findall(r"var\\((--c[0-9a-f]{6})\\)", text)) <= defined


def test_the_parts_of_two_pictures_are_not_taken_for_each_other(tmp_path):
    study(tmp_path)
    ids = re.findall(r' id="([^"]+)"', made(tmp_path))
    assert len(ids) == len(set(ids))
    text = made(tmp_path)
    for used in set(re.findall(r'xlink:href="#([^"]+)"|url\\(#([^)]+)\\)', text)):
        assert f'id="{used[0] or used[1]}"' in text


@pytest.mark.usefixtures("undrawn")
def test_runs_are_linked_where_they_are(tmp_path):
    folder = make_run(tmp_path / "some where", "a run #1?", 0.9)
    change(folder, wandb={"url": "https://wandb.ai/me/p/runs/1", "path": "me/p/1"})
    change(make_run(tmp_path / "some where", "evil", 0.9, seed=1), wandb={"url": "javascript:alert(1)"})
    links = Page(made(tmp_path)).links
    assert links[:3] == [
        "some%20where/a%20run%20%231%3F", "some%20where/a%20run%20%231%3F/config.yaml", "https://wandb.ai/me/p/runs/1",
    ]  # fmt: skip
    assert not any("javascript" in link for link in links)


@pytest.mark.usefixtures("undrawn")
def test_words_say_who_leads_what_is_clear_and_what_is_level(tmp_path):
    study(tmp_path)
    (table,) = tables_of([tmp_path]).tables
    # over fedavg: 4.8333 +- 0.2887 / sqrt(3) * t(1 - 0.025 / 2, 2) = 6.2053: 1.0343; over local 0.1667 +- 2.5856
    assert summary(table) == [
        "mnist s=0.1: jgesr has the best mean, 95.83 % over 3 seeds. It is clear of fedavg; its smallest clear lead is "
        "over fedavg, +4.83 [+3.80, +5.87]. It cannot be told apart from local (+0.17 [-2.42, +2.75])."
    ]
    assert "It cannot be told apart from local" in " ".join(Page(made(tmp_path)).text)


def test_words_for_two_methods_with_the_best_mean_name_the_one_that_is_compared(tmp_path):
    accuracies = [(0.90, 0.95, 0.94), (0.94, 0.95, 0.96), (0.935, 0.945, 0.945)]
    for seed, values in enumerate(accuracies):
        for method, accuracy in zip(("fedavg", "local", "jgesr"), values, strict=True):
            make_run(tmp_path, f"{method}_{seed}", accuracy, method=method, seed=seed)
    (table,) = tables_of([tmp_path]).tables
    (text,) = summary(table)
    assert text.startswith(
        "mnist s=0.1: local and jgesr have the best mean, 94.83 % over 3 seeds. The others are compared"
    )
    assert "with local, the first of these. local cannot be told apart from fedavg (+2.33 [" in text
    assert " It " not in text


def test_the_page_says_why_its_words_and_its_tables_have_other_intervals(tmp_path):
    study(tmp_path)
    (table,) = tables_of([tmp_path]).tables
    told = reading(table, "settings")
    assert "corrected for the number of methods that the best one is compared with (Holm). Those of the tables" in told
    assert "all of them to jgesr" in told


@pytest.mark.usefixtures("undrawn")
def test_a_file_that_is_no_page_is_not_replaced_by_one(tmp_path):
    study(tmp_path)
    mine = tmp_path / "study.yaml"
    mine.write_text("base: base\n")
    for path in (mine, tmp_path / "page"):  # a page of that name could not be made anew
        with pytest.raises(ConfigError, match=rf"{path} does not end with \.html, as a page must"):
            report.main([str(tmp_path), "--out", str(path)])
    assert mine.read_text() == "base: base\n"
    assert report.main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert report.main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0


def test_words_for_one_seed_and_for_one_method(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    (table,) = tables_of([tmp_path]).tables
    assert summary(table) == ["mnist s=0.1: fedavg alone was run, with 90.00 % over one seed."]
    make_run(tmp_path, "b", 0.95, method="jgesr")
    (table,) = tables_of([tmp_path]).tables
    (text,) = summary(table)
    assert text.startswith("mnist s=0.1: jgesr has the best mean, 95.00 % over one seed. With one seed nothing can be")
    assert "fedavg, the next, is +5.00" in text


def test_no_lead_is_told_between_runs_of_other_seeds(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg", seed=3)
    make_run(tmp_path, "b", 0.95, method="jgesr", seed=0)
    (table,) = tables_of([tmp_path]).tables
    (text,) = summary(table)
    assert text.endswith("No lead is told over fedavg, which share no seed with it: other clients, other data.")
    assert "+5.00" not in text


def test_who_leads_by_a_seed_of_its_own_and_is_behind_on_the_others_is_not_the_best(tmp_path):
    for seed, behind in enumerate((0.05, 0.051, 0.052)):
        make_run(tmp_path, f"a{seed}", 0.5, method="fedavg", seed=seed)
        make_run(tmp_path, f"b{seed}", 0.5 + behind, method="local", seed=seed)
    make_run(tmp_path, "lucky", 0.9, method="fedavg", seed=9)
    (table,) = tables_of([tmp_path]).tables
    assert [entry.leads for entry in table.entries.values()] == [False, True]
    assert not any(entry.best for entry in table.entries.values())
    assert summary(table) == [
        "mnist s=0.1: fedavg has the best mean, 60.00 % over 4 seeds. "
        "On the seeds in common it is behind local (-5.10 [-5.35, -4.85])."
    ]


def test_words_for_one_seed_in_common(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path, f"a{seed}", 0.5, method="fedavg", seed=seed)
        make_run(tmp_path, f"b{seed}", 0.6, method="local", seed=seed + 1)
    (table,) = tables_of([tmp_path]).tables
    assert "With one seed in common nothing can be said of chance: the lead over fedavg" in summary(table)[0]


def test_results_of_several_folders_go_where_they_all_lie(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    assert beside([one], "figures") == one / "figures"
    assert beside([one, two], "figures").resolve() == tmp_path / "figures"
    assert beside([tmp_path / "stored.json"], "figures") == tmp_path / "stored_figures"


def test_a_metric_without_pictures_and_one_table_a_protocol(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "short", 0.3, method="fedavg", rounds=5)
    page = Page(made(tmp_path, "--metric", "loss/train"))
    assert "Table 2" in page.text
    assert not page.sources


def test_the_page_stays_small_and_names_what_it_leaves_out(tmp_path, monkeypatch):
    study(tmp_path)
    whole = made(tmp_path)
    monkeypatch.setattr(report, "LIMIT", 60_000)
    text = made(tmp_path)
    assert len(text) < min(90_000, len(whole))
    assert "Left out to keep the page small" in text


@pytest.mark.parametrize("clients", [1, 2, 60])
def test_any_number_of_clients(tmp_path, clients):
    folder = make_run(tmp_path, "a", 0.9)
    values = np.linspace(0, 1, clients).tolist()
    change(folder, clients={"accuracy/received": values})
    lines = [f"{k},6,2,8,0,0" for k in range(clients)]
    (folder / "partition.csv").write_text("\n".join(["client,train,test,a,b,c", *lines]) + "\n")
    np.savez(folder / "graphs.npz", round_00002=np.ones((clients, clients)))
    assert "network_jgesr" in made(tmp_path)


def test_numbers_in_figures_stay_as_they_are_written(tmp_path):
    for seed in range(2):
        for alpha in (0.012345, 0.5):
            make_run(tmp_path, f"r{alpha}{seed}", 0.9 + seed / 100 + alpha / 50, alpha=alpha, seed=seed)
    text = made(tmp_path)
    assert text.count(">jgesr (alpha=0.012345)<") >= 3  # rows of both figures or curves, and of the tables
    assert re.search(r"<text[^>]*>jgesr \(alpha=0.012345\)<", text)


@pytest.mark.parametrize(("count", "rest"), [(9, "3 others"), (7, "another")])
def test_many_methods_level_with_the_best_are_counted(tmp_path, count, rest):
    generator = np.random.default_rng(0)
    for place in range(count):
        for seed in range(3):
            accuracy = 0.9 + float(generator.normal(0, 0.02))
            make_run(tmp_path, f"r{place}{seed}", accuracy, alpha=1.0 + place, seed=seed)
    (table,) = tables_of([tmp_path]).tables
    ahead = [one.clear_of_all for one in table.against_leader["mnist", 0.1, 0.0].values()]
    assert ahead == [False] * (count - 1)
    (text,) = summary(table)
    level = text.partition("cannot be told apart from ")[2]
    assert level.count("(alpha=") == 5 and level.endswith(f" and {rest}.")


@pytest.mark.usefixtures("undrawn")
def test_diagnostics_show_how_far_from_stationary_a_solver_stopped(tmp_path):
    for seed, residual in enumerate((1e-3, 3e-3)):
        folder = make_run(tmp_path, f"r{seed}", 0.9, seed=seed)
        change(folder, {"last.aggregator/stationarity_models": residual, "last.aggregator/iterations": 60 + seed})
    text = made(tmp_path)
    assert "<th>residual of models</th>" in text and "residual of graph" not in text
    assert "<td>2.0e-03</td>" in text
    assert "optimality conditions of J fail" in text
