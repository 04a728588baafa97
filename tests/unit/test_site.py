"""The documentation site has every document and every page that is made."""

from pathlib import Path

import yaml

from scripts.docs import keys
from scripts.docs.hooks import NOTEBOOKS, OUTSIDE, api_pages
from trainer.config.composition import choices_of_groups

ROOT = Path(__file__).resolve().parents[2]


def pages_of(nav):
    """Return the pages of a level of the navigation and of those below it."""
    entries = []
    for entry in nav:
        [target] = entry.values()
        entries += [target] if isinstance(target, str) else pages_of(target)
    return entries


def test_the_navigation_has_every_page_once(monkeypatch):
    # A page composes the defaults of each choice, and its name needs none.
    few = {group: choices[:2] for group, choices in choices_of_groups().items()}
    monkeypatch.setattr(keys, "choices_of_groups", lambda: few)
    nav = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    documents = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    made = {*OUTSIDE.values(), *NOTEBOOKS.values(), *api_pages(), *keys.key_pages()}
    made.add("reference/commands.md")
    assert sorted(nav) == sorted(documents | made)
