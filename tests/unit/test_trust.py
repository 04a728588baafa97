"""docs/trust.md: its program prints the output that it shows."""

import re
import runpy
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trust.md").read_text()


def test_the_program_prints_what_the_page_shows(tmp_path, capsys):
    program, shown = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "features.py"
    path.write_text(program)
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed == shown, (
        f"docs/trust.md is stale; its second block is now\n{printed}"
    )
