"""Everything on the page "Bring your own" runs as it stands there, from top to bottom in an empty folder."""

import re
import shlex
from pathlib import Path

from jgesr_lightning import cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "bring-your-own.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands, output = 0, ""
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
        else:
            assert language == "toml"
    assert commands == 20
    assert "Trimmed (share=0.25)" in output  # the study's table
    assert re.search(r"^shades/dark/3.png,(dark|light),", output, re.MULTILINE)
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"trimmed", "hospitals", "from_python"}
    assert (tmp_path / "shades_models" / "card.json").is_file()
    assert (tmp_path / "runs" / "hospitals" / "attached" / "oslo" / "model.safetensors").is_file()
