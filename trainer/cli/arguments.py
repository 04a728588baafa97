"""`key=value` arguments of commands and scripts, like those of training.

A command describes its arguments as a frozen dataclass with fields made by `argument`.
A field without a default is required.
"""

import dataclasses
import difflib
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from trainer.errors import UserError, explain_file_errors, run_and_flush
from trainer.text import check_unique_keys, nearest, show

HELP_WIDTH = 79
KEY_COLUMNS = 26  # part of HELP_WIDTH that shows the keys
MAX_INTEGER = 2**31 - 1  # JAX's integers have 32 bits
YES_NO = {"yes": True, "true": True, "no": False, "false": False}
HELP = ("--help", "-h")
BATCH_HELP = "number of the training batch, of which the first micro-batch is taken"
STEP_HELP = (
    "the checkpoint: newest, best (lowest validation loss), or its number of steps"
)


def argument(help: str, default: typing.Any = dataclasses.MISSING) -> typing.Any:
    """Return the dataclass field of one argument of a command."""
    return dataclasses.field(default=default, metadata={"help": help})


def names_of(cls: type) -> list[str]:
    """Return the keys of a command."""
    return [field.name for field in dataclasses.fields(cls)]


def parse[T](cls: type[T], argv: Sequence[str]) -> T:
    """Parse `key=value` strings as `cls`; UserError for an unknown or missing key."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    # W&B's agents call a program with --key=value.
    argv = without_dashes(argv, lambda: list(fields))
    values = {}
    check_unique_keys(argv)
    for text in argv:
        key, separator, value = text.partition("=")
        if not separator:
            raise UserError(
                f"{text!r}: expected key=value. Valid keys: {', '.join(fields)}"
            )
        if key not in fields:
            raise UserError(f"unknown key {key}; {nearest(key, list(fields))}")
        values[key] = _convert(typing.get_type_hints(cls)[key], key, value)
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING
    ]
    if missing:
        raise UserError(
            f"missing {', '.join(f'{name}=' for name in missing)}; --help explains"
        )
    return cls(**values)


def split(text: str) -> list[str]:
    """Split at commas outside of brackets: `[a,b]` is one value."""
    # A comma before the next `]` without a `[` between them is inside of brackets.
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def check_at_least(arguments: object, **bounds: int) -> None:
    """Raise UserError for an argument that is less than its bound, and not null."""
    for name, bound in bounds.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise UserError(f"{name}={value}: expected {bound} or more")


def _convert(hint: typing.Any, key: str, value: str) -> typing.Any:
    """Return the value as its annotated type; `null` is None for `X | None`."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # X | None
        # As in the configuration, whose keys these arguments stand beside.
        if value == "null":
            return None
        return _convert(choices[0], key, value)
    if origin is typing.Literal:
        if value not in choices:
            raise UserError(f"{key}={value} is not a choice; {nearest(value, choices)}")
        return value
    if hint is bool:
        if value.lower() not in YES_NO:
            raise UserError(f"{key}={value}: expected yes or no")
        return YES_NO[value.lower()]
    kinds = {int: "a whole number", float: "a number"}
    if hint not in kinds:
        return value
    try:
        number = hint(value)
    except ValueError:
        raise UserError(f"{key}={value}: expected {kinds[hint]}") from None
    # A larger one would overflow in JAX, or fail with a traceback.
    if hint is int and abs(number) > MAX_INTEGER:
        raise UserError(f"{key}={value}: expected at most {MAX_INTEGER}")
    return number


def without_dashes(
    argv: Sequence[str],
    keys: Callable[[], Sequence[str]],
    flags: Collection[str] = (),
) -> list[str]:
    """Return the arguments with `--key=value`, W&B's form, as `key=value`.

    Args:
      argv: the arguments.
      keys: returns the valid keys; only called for a message.
      flags: names of options that stay as they are.

    Raises:
      UserError: `--key value`; the message names the nearest of the valid keys.
    """
    converted = []
    # The argument after an option may be its value, which the message then repeats.
    for text, following in itertools.pairwise([*argv, ""]):
        if not re.match("--[a-zA-Z]", text) or text.partition("=")[0] in flags:
            converted.append(text)
        elif "=" in text:
            converted.append(text.lstrip("-"))
        else:
            raise UserError(explain_dashes(text, following, keys()))
    return converted


def explain_dashes(option: str, following: str, keys: Sequence[str]) -> str:
    """Return the message for `--key`, or `--key value`, which names the nearest keys.

    `following`: the argument after the option; empty: none.
    """
    value = "VALUE"
    typed = option
    if following and "=" not in following and following[0] != "-":
        value = following
        typed = f"{option} {value}"
    hint = "--help lists the keys"
    close = nearest_keys(option.lstrip("-").replace("-", "_"), keys)
    if close:
        hint = f"use {' or '.join(f'{key}={value}' for key in close)}"
    return f"{typed}: arguments are key=value; {hint}"


def nearest_keys(name: str, keys: Sequence[str]) -> list[str]:
    """Return up to three dotted keys whose last part is most similar to `name`.

    Keys of train and optimizer come first.
    """
    if name in keys:
        return [name]
    # A user who leaves out the group has the last part right.
    by_last_part: dict[str, list[str]] = {}
    for key in keys:
        by_last_part.setdefault(key.rpartition(".")[2], []).append(key)
    close = difflib.get_close_matches(name, list(by_last_part), n=1, cutoff=0.6)
    if not close:
        return []
    preferred = ("train.", "optimizer.")
    similar = by_last_part[close[0]]
    return sorted(similar, key=lambda key: not key.startswith(preferred))[:3]


def table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield lines of two columns, the second one wrapped."""
    for left, right in rows:
        width = HELP_WIDTH - KEY_COLUMNS
        # A broken command or path could not be pasted.
        lines = textwrap.wrap(right, width, break_on_hyphens=False) or [""]
        # Two columns of margin, and two between the columns.
        if len(left) + 4 > KEY_COLUMNS:
            yield f"  {left}".rstrip()
        else:
            yield f"  {left:<{KEY_COLUMNS - 2}}{lines.pop(0)}".rstrip()
        yield from (" " * KEY_COLUMNS + line for line in lines)


def wrapped(about: str) -> str:
    """Return a docstring with its paragraphs wrapped, and its commands indented."""
    paragraphs = []
    for paragraph in about.strip().split("\n\n"):
        # The formatter of the code removes an indentation that all lines have.
        if re.match(r" |scalify-trainer |python -m ", paragraph):
            text = textwrap.indent(textwrap.dedent(paragraph), "    ")
        else:
            text = textwrap.fill(paragraph, HELP_WIDTH, break_on_hyphens=False)
        paragraphs.append(text)
    return "\n\n".join(paragraphs)


def with_choices(about: str, choices: Sequence[str]) -> str:
    """Return `about` with the choices added, unless it names all of them."""
    if all(choice in about for choice in choices):
        # The same names twice make a help longer and tell nothing.
        return about
    return f"{about} ({', '.join(choices)})"


def command_help(cls: type) -> Iterator[str]:
    """Return the lines that explain a command's keys."""
    hints: Mapping[str, typing.Any] = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        text, default = field.metadata["help"], field.default
        if default is dataclasses.MISSING:
            text, default = f"{text} (required)", ""
        # A default is shown as it is typed.
        elif isinstance(default, bool):
            default = "yes" if default else "no"
        elif default is None:
            default = "null"
        if typing.get_origin(hints[field.name]) is typing.Literal:
            text = with_choices(text, typing.get_args(hints[field.name]))
        elif isinstance(field.default, bool):
            text = f"{text} (yes or no)"
        rows.append((f"{field.name}={default}", text))
    return table(rows)


def run_script[T](
    cls: type[T], name: str, about: str, main: Callable[[T], None]
) -> int:
    """Run `main` as `python -m scripts.NAME`, and return the exit code."""
    return run_command(cls, f"python -m scripts.{name}", about, main, sys.argv[1:])


def run_command[T](
    cls: type[T],
    program: str,
    about: str,
    main: Callable[[T], None],
    argv: Sequence[str],
) -> int:
    """Call `main` with the arguments that `argv` gives, and return the exit code.

    `program` and `about` are shown by `--help`.
    """

    def call() -> None:
        # Help comes first, so that it answers beside an argument that is not valid.
        if asks_for_help(argv):
            usage = f"usage: {program} key=value ..."
            show("\n".join([usage, "", wrapped(about), "", *command_help(cls)]))
        else:
            main(parse(cls, argv))

    return run_main(call)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether `--help` is among the arguments."""
    return not set(HELP).isdisjoint(argv)


def run_main(main: Callable[[], None]) -> int:
    """Call `main`, and return the exit code.

    The code is 0. After a UserError, which is printed, it is the error's `exit_code`.
    After a broken pipe it is 141.
    """

    def call() -> int:
        # Inside of `run_and_flush`, which prints UserErrors, and needs their exit code.
        with explain_file_errors():
            main()
        return 0

    return run_and_flush(call)
