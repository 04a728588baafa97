"""Pages of the site with every key and every command, from what `--help` prints."""

import importlib
import re
import textwrap
from collections.abc import Iterator, Mapping

from trainer.__main__ import COMMANDS
from trainer.cli.arguments import command_help
from trainer.config.composition import choices_of_groups
from trainer.config.reference import Group, Key, reference

FOLDER = "reference/keys"
GENERAL = "general"  # the page of the keys without a group


def key_pages() -> dict[str, str]:
    """Return the Markdown of a page for each group of keys, by its path in the site.

    A group with choices has the keys of all of them, and a list of what each sets.
    """
    valid = choices_of_groups()
    pages = {}
    plain = reference()
    for group in plain:
        variants = {
            choice: plain if choice == group.chosen else reference([override])
            for choice in valid.get(group.name, ())
            for override in [f"{group.name}={choice}"]
        }
        text = "\n\n".join(_page(group, plain, variants))
        pages[f"{FOLDER}/{group.name or GENERAL}.md"] = f"{text}\n"
    return pages


def _page(
    group: Group, plain: list[Group], variants: Mapping[str, list[Group]]
) -> Iterator[str]:
    """Yield the paragraphs of a group's page."""
    yield f"# {group.name or 'Keys without a group'}"
    if group.about:
        yield f"{_escaped(group.about[:1].upper() + group.about[1:])}."
    if len(group.choices) > 1:
        yield f"Default: `{group.name}={group.chosen}`."
    keys = {key.name: key for key in group.keys}
    owners: dict[str, list[str]] = {}
    for choice, groups in variants.items():
        for key in _keys_of(groups, group.name):
            keys.setdefault(key.name, key)
            owners.setdefault(key.name, []).append(choice)
    for key in keys.values():
        yield f"## {key.name} {{ #{key.name} }}"
        yield _escaped(key.about)
        yield from _facts(key, owners.get(key.name, []), group)
    if len(variants) > 1:
        yield "## What each choice sets { #choices }"
        yield "Other keys keep the defaults above."
        yield "\n".join(_table(group, plain, variants))


def _facts(key: Key, owners: list[str], group: Group) -> Iterator[str]:
    """Yield a key's default, its valid names, and the choices that have it."""
    facts = [f"Default: `{key.default}`"]
    if key.choices:
        facts.append(f"Valid: {', '.join(f'`{name}`' for name in key.choices)}")
    others = [choice for choice in group.choices if choice not in owners]
    if owners and others:
        is_rare = len(owners) <= len(others)
        names = ", ".join(f"`{name}`" for name in (owners if is_rare else others))
        facts.append(f"{'Only' if is_rare else 'Not'} with `{group.name}` = {names}")
    yield "\n".join(f"- {fact}" for fact in facts)


def _keys_of(groups: list[Group], name: str) -> tuple[Key, ...]:
    """Return the keys of one group."""
    return next(group.keys for group in groups if group.name == name)


def _table(
    group: Group, plain: list[Group], variants: Mapping[str, list[Group]]
) -> Iterator[str]:
    """Yield the rows of a table with the values that each choice changes."""
    defaults = {key.name: key.default for other in plain for key in other.keys}
    yield f"| `{group.name}=` | sets |"
    yield "|---|---|"
    for choice, groups in variants.items():
        changed = [
            f"`{key.name.removeprefix(f'{group.name}.')}={key.default}`"
            for other in groups
            for key in other.keys
            if defaults.get(key.name) != key.default
        ]
        yield f"| `{choice}` | {' '.join(changed) or 'the defaults'} |"


def command_page() -> str:
    """Return the Markdown of a page with each command, its text and its own keys."""
    parts = ["# Commands"]
    for name, about in COMMANDS.items():
        parts += [f"## {name} {{ #{name} }}", f"{about[:1].upper()}{about[1:]}."]
        module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
        if name == "train":
            parts.append("It takes every key of the pages of keys.")
            continue
        parts.append(_docstring(module.__doc__ or ""))
        parts.append("\n".join(["```text", *command_help(module.Arguments), "```"]))
    return "\n\n".join(parts) + "\n"


def _docstring(text: str) -> str:
    """Return a docstring without its first line, its commands as code."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n")[1:]:
        if paragraph.lstrip().startswith("scalify-trainer "):
            code = textwrap.dedent(paragraph)
            paragraphs.append(f"```sh\n{code}\n```")
        else:
            paragraphs.append(_escaped(paragraph))
    return "\n\n".join(paragraphs)


def _escaped(text: str) -> str:
    """Return a comment as Markdown: its code stays, and nothing else is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = (re.sub(r"([\\*_\[\]<>|~])", r"\\\1", part) for part in parts[::2])
    code = [*parts[1::2], ""]
    return "".join(part + mark for part, mark in zip(plain, code, strict=True))
