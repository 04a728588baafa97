"""Helpers for text that people read: hints, secrets removed, commands that work when
they are pasted.
"""

import difflib
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError, printable

# The last word of a key decides: `max_tokens` and `tokenizer` are no secrets.
SECRET = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|credentials?|api_?key|access_?key|private_?key)$",
    re.IGNORECASE,
)
BRACES = re.compile(r"([^,\[\]'\"{}=]*)\{([^{}]*,[^{}]*)\}([^,\[\]'\"{}]*)")
# what Hydra reads without quotes
UNQUOTED = re.compile(r"[\w./\-]([\w./\- ]*[\w./\-])?", re.ASCII)
# The part before the @: a proxy's or a git server's user and password.
LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def nearest(name: str, valid: Sequence[str], prefix: str = "") -> str:
    """Return `did you mean 'x'? ` if a name is close, and the valid names.

    `prefix`: of the close name, as it is typed.
    """
    names = ", ".join(sorted(valid))
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix + close[0]!r}? Valid: {names}"
    return f"valid: {names}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 file` and `2,000 files`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def how_to_install(extra: str) -> str:
    """Return the commands that install an optional part."""
    return f"make extra-{extra}, or pip install '.[{extra}]'"


def without_braces(patterns: str) -> str:
    """Return patterns with `*.{a,b}`, which no glob of Python reads, written as
    `*.a,*.b`.
    """

    def spelled_out(match: re.Match[str]) -> str:
        start, choices, end = match.groups()
        return ",".join(
            f"{start}{choice.strip()}{end}" for choice in choices.split(",")
        )

    return BRACES.sub(spelled_out, patterns)


def check_unique_keys(arguments: Sequence[str]) -> None:
    """Raise UserError if a key of `key=value` arguments has two values, of which the
    last would count: also in the group that another argument sets.

    Nobody writes that: unless it is quoted, a shell turns `paths=[d/*.{a,b}]` into
    `paths=[d/*.a] paths=[d/*.b]`. Flags, `~key`, which removes a key, and equal
    arguments are accepted.
    """
    given: dict[str, dict[str, None]] = {}  # the values in their order
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        # Flags such as --cfg=job are no keys, and ~key=value removes one.
        if equals and not key.startswith(("-", "~")):
            given.setdefault(key, {})[value] = None
    for key, values in given.items():
        # A group in braces and one of its keys set the same value twice.
        group = next((k for k in given if key.startswith(f"{k}.")), "")
        group_value = next(iter(given.get(group, ())), "")
        if group_value.startswith("{"):
            raise UserError(
                f"{key}= and {group}={group_value}: only the last would count where"
                f" both set a key; give the keys of {group} one by one"
            )
        if len(values) > 1:
            shown = [f"{key}={value}" for value in values]
            # A brace may expand to hundreds of arguments.
            middle = ["..."] if len(shown) > 3 else shown[1:-1]
            lists = [re.fullmatch(r"\[(.*)\]", value) for value in values]
            joined = f"{key}=[{','.join(match[1] for match in lists if match)}]"
            hint = ""
            if all(lists) and len(joined) < 200:
                hint = f": {shlex.quote(joined)}"
            raise UserError(
                f"{' and '.join([shown[0], *middle, shown[-1]])}: only the last would"
                f" count; give {key} once. If the shell expanded braces, quote the"
                f" argument{hint}"
            )


def code_span(text: str) -> str:
    """Return a name that somebody else may have written as one line of Markdown, in
    which nothing is markup: letters, digits and signs of names and paths, the others as
    `?`.
    """
    # A backquote would end the span, and a line break the paragraph.
    kept = (c if c.isalnum() or c in " ._-+/=@:," else "?" for c in text[:200])
    return f"`{''.join(kept)}`"


def key_of(override: str) -> str:
    """Return the key that an override sets or removes, without the signs of Hydra."""
    return override.partition("=")[0].lstrip("+~")


def override(key: str, value: object) -> str:
    """Return `key=value` as it is typed in a shell.

    Hydra, which reads it, needs quotes of its own around unusual characters.
    """
    text = str(value)
    if not UNQUOTED.fullmatch(text):
        text = "'" + text.replace("'", r"\'") + "'"
    return shlex.quote(f"{key}={text}")


def as_typed(value: Any) -> str:
    """Return a value of the configuration as it is typed behind `key=`.

    Example:
      >>> as_typed({"until": None, "trainable": ["a", "b"]})
      '{until:null,trainable:[a,b]}'
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{','.join(map(as_typed, value))}]"
        case Mapping():
            pairs = (f"{key}:{as_typed(item)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
        case str() if not value.isprintable() or value != value.strip() or not value:
            return repr(value)
    return str(value)


def unquoted(value: str) -> str:
    """Return the text of an override's value, without the quotes that Hydra reads."""
    for quote in ("'", '"'):
        if len(value) > 1 and value[0] == value[-1] == quote:
            return value[1:-1].replace(f"\\{quote}", quote)
    return value


def merge_overrides(*layers: Sequence[str]) -> list[str]:
    """Return the `key=value` arguments of all layers, the last one of each key."""
    merged = {}
    for argument in itertools.chain(*layers):
        # +key=value sets the same key as key=value.
        merged[argument.partition("=")[0].lstrip("+")] = argument
    return list(merged.values())


def redact(tree: Any) -> Any:
    """Return nested dictionaries and lists without secrets: by a key's name
    (`hf_token`), or in a URL.
    """
    if isinstance(tree, Mapping):
        return {
            # Null is no secret, and tells that none was set.
            k: "(removed)" if SECRET.search(str(k)) and v is not None else redact(v)
            for k, v in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [redact(value) for value in tree]
    if isinstance(tree, str):
        return LOGIN_IN_URL.sub("", tree)
    return tree


def note(text: str) -> None:
    """Print a message about the progress to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """Print an answer on standard output, which may hold anybody's data.

    To a terminal it goes without control characters, elsewhere unchanged. Characters
    that the output cannot encode, such as half of a surrogate pair, are spelled out.
    """
    # A pipe gets the bytes of the text: what reads it is no terminal.
    shown = printable(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"  # a text buffer of Python's has none
    print(
        shown.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True
    )


def program_command() -> str:
    """Return this program as a command: `scalify-trainer` where it was called so."""
    if Path(sys.argv[0]).name == "scalify-trainer":
        return "scalify-trainer"
    return f"{python_command()} -m trainer"


def python_command() -> str:
    """Return this Python as a command: `python` if that is it, else its path, relative
    if below the working directory.
    """
    on_path = shutil.which("python")
    if on_path is not None and os.path.abspath(on_path) == sys.executable:
        return "python"
    path = Path(sys.executable)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))
