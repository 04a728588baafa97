import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from families import quick

from trainer.cli.arguments import argument, parse, run_command, usage
from trainer.errors import UserError, run_and_flush

ROOT = Path(__file__).resolve().parents[4]


@dataclass(frozen=True)
class Arguments:
    run_dir: str = argument("where the run is")
    seed: int = argument("any number", 0)
    top_p: float = argument("a share", 1.0)


def test_values_have_the_types_of_their_fields_and_may_hold_any_text():
    assert parse(Arguments, ["run_dir=a=b: c", "seed=3", "top_p=1"]) == Arguments(
        "a=b: c", 3, 1.0
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], r"missing run_dir="),
        (
            ["run_dir=a", "tep_p=1"],
            r"unknown key tep_p; did you mean 'top_p'\? Valid: run_dir, seed, top_p",
        ),
        (["run_dir=a", "seed=x"], r"seed=x: expected a whole number"),
        (["run_dir=a", "top_p=half"], r"top_p=half: expected a number"),
        (
            ["run_dir=a", "seed=1", "run_dir=b"],
            r"run_dir=a and run_dir=b: .* give run_dir once. If the shell",
        ),
        (["--run_dir", "a"], "--run_dir a: arguments are key=value; use run_dir=a"),
    ],
)
def test_wrong_arguments_are_named_with_what_is_valid(argv, message):
    with pytest.raises(UserError, match=message):
        parse(Arguments, argv)


def test_help_lists_every_argument_with_its_default():
    text = usage(Arguments, "generate", "What it does.")
    assert re.search(r"^  run_dir= +where the run is \(required\)$", text, re.M)
    assert re.search("^  seed=0 +any number$", text, re.M)


def test_user_errors_are_one_line_and_exit_code_2(capsys):
    argv = ["run_dir=a", "seed=x"]
    assert run_command(Arguments, "generate", "", lambda args: None, argv) == 2
    assert capsys.readouterr().err == "error: seed=x: expected a whole number\n"


PRINTING = pytest.mark.parametrize(
    "command",
    quick(
        [
            "trainer compare --help",
            "trainer plan --help",
            "trainer explain --help",
            "trainer --cfg job",
        ],
        "trainer compare --help",
    ),
)


@PRINTING
def test_where_a_full_disk_takes_no_output_the_end_is_one_line(command, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=tmp_path,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "error: cannot write to standard output: No space left on device; make room,"
        " or send it to another place\n",
    )


@PRINTING
def test_where_nobody_reads_on_the_end_is_without_a_word(command, tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env=environment,
        stdout=write_end,
        stderr=subprocess.PIPE,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    with open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            run_and_flush(lambda: (_ for _ in ()).throw(BrokenPipeError()))
