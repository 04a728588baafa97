"""`key=value` arguments of commands and scripts, like those of training.

A command describes its arguments as a frozen dataclass with fields made by `argument`.
A field without a default is required.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Sequence

from trainer.errors import UserError, complain, run_and_flush
from trainer.text import nearest, refuse_twice


def argument(help: str, default: typing.Any = dataclasses.MISSING) -> typing.Any:
    """Return a field of a command's arguments."""
    return dataclasses.field(default=default, metadata={"help": help})


def read[T](cls: type[T], argv: Sequence[str]) -> T:
    """Parse `key=value` strings as `cls`; UserError for an unknown or missing key."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {}
    refuse_twice(argv)
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
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _convert(hint: typing.Any, key: str, value: str) -> typing.Any:
    kinds = {int: "a whole number", float: "a number"}
    if hint not in kinds:
        return value
    try:
        return hint(value)
    except ValueError:
        raise UserError(f"{key}={value}: expected {kinds[hint]}") from None


def note(text: str) -> None:
    """Print a message about the progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def usage(cls: type, program: str, about: str) -> str:
    """Return the text of `--help`."""
    lines = [f"usage: {program} key=value ...", "", about.strip(), ""]
    for field in dataclasses.fields(cls):
        default = f"default {field.default!r}"
        if field.default is dataclasses.MISSING:
            default = "required"
        lines.append(f"  {field.name}=  {field.metadata['help']} ({default})")
    return "\n".join(lines)


def run_script[T](
    cls: type[T], name: str, about: str, main: Callable[[T], None]
) -> int:
    """Run `main` as `python -m scripts.NAME`, and return the exit code."""
    return run(cls, f"python -m scripts.{name}", about, main, sys.argv[1:])


def run[T](
    cls: type[T],
    program: str,
    about: str,
    main: Callable[[T], None],
    argv: Sequence[str],
) -> int:
    """Call `main` with the arguments that `argv` gives, and return the exit code.

    It is 0, that of a UserError after a line on stderr, or 141 for a broken pipe.
    `program` and `about` are shown by `--help`.
    """

    def parse_and_call() -> int:
        if "--help" in argv or "-h" in argv:
            print(usage(cls, program, about))
            return 0
        try:
            main(read(cls, argv))
        except UserError as error:
            complain(error)
            return error.exit_code
        return 0

    return run_and_flush(parse_and_call)
