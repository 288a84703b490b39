"""Everything on the page "Bring your own" runs as it stands there, from top to bottom in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest

from jgesr_lightning import cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "bring-your-own.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


NUMBER = re.compile(r"(\d+\.\d+)")
LEARNED = re.compile(r"^  (?:trained|received) +(\d+\.\d+) %", re.MULTILINE)


def is_shown(line, output):
    """Whether a line of the page is one of the output, but for a few hundredths in its numbers."""
    words = NUMBER.split(line)[::2]
    numbers = [float(number) for number in NUMBER.findall(line)]
    pattern = r"(\d+\.\d+)".join(map(re.escape, words))
    return any(
        [float(number) for number in found.groups()] == pytest.approx(numbers, rel=0.03)
        for found in re.finditer(rf"^{pattern}$", output, re.MULTILINE)
    )


def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    commands, output, accuracies = 0, "", []
    for language, file, content in BLOCK.findall(PAGE.read_text()):
        if file:
            (tmp_path / file).write_text(content)
        elif language == "python":
            exec(compile(content, str(PAGE), "exec"), {})
        elif language == "console":
            for line in content.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "jgesr"
                status = cli.main(arguments)
                shown = capsys.readouterr()
                assert status == 0, f"{line}\n{shown.err}"
                commands, output = commands + 1, output + shown.out
                accuracies += [float(value) for value in LEARNED.findall(shown.err)]
        elif language == "text":
            assert not [line for line in content.splitlines() if not is_shown(line, output)]
        else:
            assert language == "toml"
    assert commands == 27
    assert len(accuracies) == 2 * 15 and min(accuracies) > 75  # they learn: at most half of them is chance
    assert "Trimmed (share=0.25)" in output  # the study's table
    assert re.search(r"^shades/dark/3.png,(dark|light),", output, re.MULTILINE)
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"trimmed", "hospitals", "from_python"}
    assert (tmp_path / "shades_models" / "card.json").is_file()
    assert (tmp_path / "runs" / "hospitals" / "attached" / "oslo" / "model.safetensors").is_file()
