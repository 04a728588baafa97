"""Commands that take the keys of training beside their own."""

import logging
from collections.abc import Callable, Iterator, Sequence

from trainer.cli.arguments import (
    answer,
    asks_for_help,
    names_of,
    nearest_keys,
    own_keys,
    read,
    table,
    without_dashes,
    wrapped,
)
from trainer.config.composition import is_override
from trainer.config.reference import Group, reference
from trainer.errors import UserError
from trainer.text import key_of, note, refuse_twice, show

CONFIG = "config"  # config=FILE, which is no key of the schema


def training_keys() -> list[str]:
    """Return the groups and keys of training, as they are typed."""
    groups = reference()
    names = [group.name for group in groups if group.choices]
    return [CONFIG, *names, *(key.name for group in groups for key in group.keys)]


def run_composing[T](
    cls: type[T],
    program: str,
    about: str,
    main: Callable[[T, list[str]], None],
    argv: Sequence[str],
    only: str | None = None,
) -> int:
    """Call `main` with a command's own arguments and the keys of training.

    `only`: the one group of keys that the command takes. Returns the exit code.
    """

    def call() -> None:
        refuse_twice(argv)
        arguments, overrides = split_arguments(cls, argv, only)
        main(arguments, overrides)

    def show_help() -> None:
        show(f"usage: {program} [key=value ...] [group=choice ...]\n")
        show(wrapped(about))
        show("\n" + "\n".join(own_keys(cls)))
        overrides = [
            text
            for text in argv
            if is_override(text) and key_of(text) not in command_keys
        ]
        show("\n" + "\n".join(explained(overrides, only)))

    command_keys = names_of(cls)
    return answer(show_help if asks_for_help(argv) else call)


def run_on_text[T](
    cls: type[T],
    program: str,
    about: str,
    main: Callable[[T, list[str]], None],
    argv: Sequence[str],
    stopped: str,
) -> int:
    """Run a command that takes the keys of the group `data`, and return the exit code.

    `stopped`: what a Ctrl-C means for its result.
    """
    logger = logging.getLogger("trainer")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    try:
        return run_composing(cls, program, about, main, argv, only="data")
    except KeyboardInterrupt:
        note(f"stopped; {stopped}")
        return 130


def split_arguments[T](
    cls: type[T], argv: Sequence[str], only: str | None = None
) -> tuple[T, list[str]]:
    """Return a command's own arguments, and the rest, which are keys of training.

    Raises:
      UserError: a key that is neither.
    """
    command_keys = names_of(cls)
    argv = without_dashes(argv, lambda: [*command_keys, *_keys_in(only)])
    mine = [text for text in argv if key_of(text) in command_keys]
    others = [text for text in argv if key_of(text) not in command_keys]
    for text in others:
        if not is_override(text):
            raise UserError(f"{text!r}: expected key=value; --help lists the keys")
        key = key_of(text)
        is_known = "." in key if only is None else key.startswith(f"{only}.")
        if is_known:
            continue  # the composition answers
        valid = _keys_in(only)
        if key not in {name.partition(".")[0] for name in valid}:
            close = nearest_keys(key, [*command_keys, *valid])
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise UserError(
                f"unknown key {key}; {hint}Valid: {', '.join(command_keys)}, and keys"
                f" of {only or 'training'}; --help explains them"
            )
    return read(cls, mine), others


def _keys_in(only: str | None) -> list[str]:
    keys = training_keys()
    return keys if only is None else [k for k in keys if k.split(".")[0] == only]


def explained(overrides: Sequence[str], only: str | None = None) -> Iterator[str]:
    """Yield the lines that explain the keys of training, with the values that these
    overrides give them. Raises UserError for one that is not valid.
    """
    for group in reference(overrides):
        if only is None or group.name == only:
            yield from _group_lines(group)
            yield ""


def _group_lines(group: Group) -> Iterator[str]:
    """Yield the lines of a group."""
    if group.choices:
        chosen = f"{group.name}={group.chosen}"
        yield from table([(chosen, f"{group.about}: {', '.join(group.choices)}")])
    elif group.name:
        yield from table([(f"{group.name}.*", group.about)])
    yield from table(
        (f"{key.name}={key.default}", _with_choices(key.about, key.choices))
        for key in group.keys
    )


def _with_choices(about: str, choices: Sequence[str]) -> str:
    """Return a comment with the choices, unless it names them all."""
    if all(choice in about for choice in choices):
        return about
    return f"{about} ({', '.join(choices)})"
