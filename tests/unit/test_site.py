"""The documentation site has every document, every key, every command and public name."""

import re
from pathlib import Path

import pytest
import yaml

from scalify_core import functional, optim, static
from scripts.docs.hooks import (
    NOTEBOOKS,
    OUTSIDE,
    anchor,
    api_pages,
    linked_files,
    notebook_page,
    source_page,
    with_links,
)
from scripts.docs.keys import command_page, key_pages
from trainer.__main__ import COMMANDS
from trainer.config.reference import reference

ROOT = Path(__file__).resolve().parents[2]


def pages_of(nav):
    """The pages of a level of the navigation and of those below it."""
    entries = []
    for entry in nav:
        [target] = entry.values()
        entries += [target] if isinstance(target, str) else pages_of(target)
    return entries


@pytest.fixture(scope="module")
def keys():
    return key_pages()


def test_the_navigation_has_every_page_once(keys):
    nav = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    documents = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    made = {*OUTSIDE.values(), *NOTEBOOKS.values(), *api_pages(), *keys}
    made.add("reference/commands.md")
    assert sorted(nav) == sorted(documents | made)


def test_a_notebook_is_a_page_with_code_and_outputs():
    assert set(NOTEBOOKS) == {
        f"examples/{path.name}" for path in (ROOT / "examples").glob("*.ipynb")
    }
    page = notebook_page("examples/train_and_look.ipynb")
    assert page.startswith("# Train a model")
    assert "```python\nfrom trainer import compose, train" in page
    assert "<svg" in page
    assert "best: runs/first" in page or "best: runs/smaller_lr" in page


def test_every_key_has_its_heading_default_and_comment(keys):
    text = "\n".join(keys.values())
    seen = set()
    for overrides in ([], ["model=llama_nano"], ["optimizer=muon"]):
        for group in reference(overrides):
            for key in group.keys:
                if key.name in seen:
                    continue
                seen.add(key.name)
                heading = f"## {key.name} {{ #{key.name} }}"
                assert text.count(heading) == 1, key.name
                section = text.partition(heading)[2].partition("\n## ")[0]
                assert "- Default: `" in section
                assert key.about in section.replace("\\", ""), key.name
    assert (
        "Only with `optimizer` = `muon`, `sgd`" in keys["reference/keys/optimizer.md"]
    )
    assert (
        "| `gpt2_124m` | `name=gpt2_124m` `n_layer=12`"
        in keys["reference/keys/model.md"]
    )


def test_every_command_is_explained():
    text = command_page()
    assert re.findall(r"^## ([\w-]+) ", text, re.MULTILINE) == list(COMMANDS)
    assert "run_dir=" in text.partition("## evaluate ")[2]
    prose = "".join(text.split("```")[::2])
    assert "scalify-trainer " not in re.sub(r"`[^`]*`", "", prose)


def test_the_api_has_every_public_name():
    pages = api_pages()
    for module in (functional, optim, static):
        text = pages[f"reference/{module.__name__.rpartition('.')[2]}.md"]
        listed = re.findall(r"^::: \S+\.(\w+)\n.*heading", text, re.MULTILINE)
        assert sorted(listed) == sorted(module.__all__)
    text = pages["reference/scalify_core.md"]
    assert len(re.findall(r"^::: scalify_core\.\S+$", text, re.MULTILINE)) == 10
    text = pages["reference/weights.md"]
    assert "::: scalify_core.optim.weights.apply_updates\n" in text
    assert "._" not in text


def test_links_of_the_forge_become_links_of_the_site():
    text = "[a](../README.md) [b](trust.md#x) [gpu.md](gpu.md) [c](../pyproject.toml)\n```py\n[d](../LICENSE)\n```\n"
    assert with_links(text, "models.md") == (
        "[a](index.md) [b](trust.md#x) [GPUs](gpu.md) [c](source/pyproject.toml.md)\n"
        "```py\n[d](../LICENSE)\n```\n"
    )
    assert with_links("[a](docs/models.md#b)", "index.md") == "[a](models.md#b)"
    assert linked_files([text]) == ["LICENSE", "pyproject.toml"]
    assert source_page(".python-version").startswith("# .python-version\n\n````text\n3")
    assert anchor("Plan for an H200, compiled `x_y`") == "plan-for-an-h200-compiled-x_y"
