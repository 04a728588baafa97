"""The documentation site has every document, every key, every command and public name."""

from pathlib import Path

import pytest
import yaml

from scripts.docs.hooks import (
    NOTEBOOKS,
    OUTSIDE,
    api_pages,
)
from scripts.docs.keys import key_pages
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
