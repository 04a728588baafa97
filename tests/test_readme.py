"""The README's example runs as it stands, and learns; commands and links of all documents are valid."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from trainer.composition import Sweep, compose_or_explain, expanded, is_sweep

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(document):
    """The arguments of the `python -m trainer` lines of a document's code blocks."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in blocks.splitlines() if line.startswith("python -m trainer")]
    return [shlex.split(line, comments=True)[3:] for line in lines]


def test_the_commands_of_all_documents_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = 0
    for arguments in [arguments for document in DOCUMENTS for arguments in commands(document)]:
        if "model=from_init" in arguments:  # whose directory is not here
            arguments = [a for a in arguments if a != "model=from_init"]
        if is_sweep(arguments):
            assert Sweep.of(expanded(arguments)).complaints() == []
        else:
            compose_or_explain([a for a in arguments if a not in ("--cfg", "job")])
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, heading = link.partition("#")
        if path.startswith("http"):
            continue
        target = document.parent / path if path else document
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert not heading or heading in [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings]


def test_every_document_is_named_in_the_readme():
    text = README.read_text()
    for document in (ROOT / "docs").glob("*.md"):
        assert document.name == "README.md" or f"docs/{document.name}" in text, document


def test_scalify_on_ones_own_model_runs_and_learns(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    first = code.replace("range(50)", "range(1)")
    exec(first, {})  # the loss of the first step, before any update
    before = float(capsys.readouterr().out)
    exec(code, names)
    after = float(capsys.readouterr().out)
    assert np.isfinite(after)
    assert after < 0.5 * before
    assert names["params"]["params"]["layers_0"]["kernel"].dtype == np.float16
