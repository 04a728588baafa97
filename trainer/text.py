"""Small helpers for text that people read: nothing secret in it, and commands that work
when they are pasted.
"""

import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError

SECRET = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|credentials?|api_?key|access_?key|private_?key)$",
    re.IGNORECASE,
)
BRACES = re.compile(r"([^,\[\]'\"{}=]*)\{([^{}]*,[^{}]*)\}([^,\[\]'\"{}]*)")
LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def nearest(name: str, valid: Sequence[str]) -> str:
    """`did you mean 'x'? ` when something close exists, then the valid names."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(sorted(valid))}"


def without_braces(patterns: str) -> str:
    """The patterns with `*.{a,b}`, which no glob of Python reads, spelled out as
    `*.a,*.b`.
    """
    return BRACES.sub(
        lambda found: ",".join(
            found[1] + part.strip() + found[3] for part in found[2].split(",")
        ),
        patterns,
    )


def refuse_twice(arguments: Sequence[str]) -> None:
    """Raise UserError where one key of `key=value` arguments has two values, of which
    the last would count alone.

    Nobody writes that: a shell takes `paths=[d/*.{a,b}]`, unless it is in quotes, for
    `paths=[d/*.a] paths=[d/*.b]`. Flags, `~key`, which removes one, and what stands
    there twice alike are let through.
    """
    given: dict[str, dict[str, None]] = {}  # the values in their order
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and not key.startswith(("-", "~")):
            given.setdefault(key, {})[value] = None
    for key, values in given.items():
        if len(values) > 1:
            shown = [f"{key}={value}" for value in values]
            middle = ["..."] if len(shown) > 3 else shown[1:-1]
            lists = [re.fullmatch(r"\[(.*)\]", value) for value in values]
            whole = f"{key}=[{','.join(found[1] for found in lists if found)}]"
            hint = f": {shlex.quote(whole)}" if all(lists) and len(whole) < 200 else ""
            raise UserError(
                f"{' and '.join([shown[0], *middle, shown[-1]])}: only the last would"
                f" count; give {key} once, in quotes if the shell made two of what has"
                f" braces{hint}"
            )


def laid_over(*layers: Sequence[str]) -> list[str]:
    """The `key=value` arguments of all layers, of each key the last: for programs that
    start a trainer with them.
    """
    return list(
        {
            argument.partition("=")[0].lstrip("+"): argument
            for layer in layers
            for argument in layer
        }.values()
    )


def redact(tree: Any) -> Any:
    """Nested dictionaries and lists without what a key's name (`hf_token`, `password`,
    ...) or an URL gives away.
    """
    if isinstance(tree, Mapping):
        return {
            k: "(removed)" if SECRET.search(str(k)) and v is not None else redact(v)
            for k, v in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [redact(value) for value in tree]
    return LOGIN_IN_URL.sub("", tree) if isinstance(tree, str) else tree


def interpreter() -> str:
    """This Python as a command: `python` where that is it, else by its path, from the
    working directory if below.
    """
    found = shutil.which("python")
    if found is not None and os.path.abspath(found) == sys.executable:
        return "python"
    path = Path(sys.executable)
    return shlex.quote(
        str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    )
