"""What the pages name is there: files that they link to, pictures, tests that hold a promise."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_are_there(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_test_that_holds_a_promise_is_there():
    named = re.findall(r"`(tests/[^`:]+)(?:::(\w+))?`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 60
    assert not [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or (test and f"\ndef {test}(" not in (ROOT / file).read_text())
    ]


def test_every_block_has_an_end():
    assert not [page for page in PAGES if len(re.findall(r"^```", page.read_text(), re.MULTILINE)) % 2]


def test_the_readme_shows_the_picture_and_the_commands_that_the_makefile_has():
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    assert "](docs/images/" in readme
    targets = set(re.findall(r"(?:`|^    )make ([a-z-]+)", readme, re.MULTILINE))
    assert {"train", "test", "docs"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def test_the_ten_lines_of_the_readme_run(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    graph = names["out"].graph
    assert (graph[:3, 3:] == 0).all() and (graph.sum(1) > 0).all()  # each with its own, and nobody alone
    assert "torch.Size([6, 500]) True" in capsys.readouterr().out
