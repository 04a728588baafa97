import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.cli.arguments import argument, parse
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


def printed_to(output, tmp_path):
    """What becomes of a command whose standard output is a file or a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "trainer", "compare", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_where_a_full_disk_takes_no_output_the_end_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = printed_to(full, tmp_path)
    assert done.returncode == 2
    message = "error: cannot write to standard output: No space left on device; "
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_where_nobody_reads_on_the_end_is_without_a_word(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = printed_to(write_end, tmp_path)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    with open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            run_and_flush(lambda: (_ for _ in ()).throw(BrokenPipeError()))
