"""The one command: which command runs, `--key=value`, and answers without JAX."""

import glob
import logging
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from trainer.__main__ import COMMANDS, command
from trainer.cli.arguments import without_dashes
from trainer.cli.evaluate import harness_command
from trainer.cli.generate import Arguments as Prompts
from trainer.cli.generate import prompts_of
from trainer.cli.train import HydraJob, check_same_text, validation_loss
from trainer.errors import UserError, run_and_flush

ROOT = Path(__file__).resolve().parents[4]
KEYS = ["model", "train.steps", "profile.steps", "optimizer.lr", "model.lr"]


def called(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["scalify-trainer", *arguments])
    with pytest.raises(SystemExit) as ended:
        command()
    return ended.value.code, *capsys.readouterr()


def test_the_log_of_a_library_has_no_control_characters(monkeypatch, capsys, caplog):
    """It names the files of a data set, as its author named them."""
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    assert called(monkeypatch, capsys, "--version")[0] == 0
    logging.getLogger("datasets.arrow").error("cannot read %r, %s", 1, "a\x1b]0;b\x07")
    assert caplog.messages == ["cannot read 1, a\\x1b]0;b\\x07"]


def test_dashes_before_a_key_are_left_out():
    given = ["--train.steps=3", "a=b", "--cfg=job", "--multirun", "-m", "~x"]
    flags = ("--cfg", "--multirun")
    assert without_dashes(given, lambda: KEYS, flags) == ["train.steps=3", *given[1:]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "100"], "--steps 100: .*; use train.steps=100 or profile.steps="),
        (["--stepz"], "use train.steps=VALUE or profile.steps=VALUE"),
        (["--model"], "--model: .*; use model=VALUE"),
        (["--zzz", "x=1"], "--zzz: .*; --help lists the keys"),
    ],
)
def test_an_option_is_answered_with_the_key(given, message):
    with pytest.raises(UserError, match=message):
        without_dashes(given, lambda: KEYS)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_explains_commands_and_keys_in_80_columns(name, monkeypatch, capsys):
    words = ["--help"] if name is None else [name, "--help"]
    code, out, _ = called(monkeypatch, capsys, *words)
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []
    if name is None:
        assert all(f"  {command} " in out for command in COMMANDS)
    else:
        assert out.startswith("usage: scalify-trainer")
        examples = [line for line in out.splitlines() if f"trainer {name} run" in line]
        assert all(line.startswith("    scalify-trainer ") for line in examples)
        assert all(line.count("scalify-trainer") == 1 for line in examples)
        # `explain` has a run_dir of its own, which training's does not follow
        keys = re.findall(r"^  ([a-z_.]+)=", out, re.MULTILINE)
        assert len(keys) == len(set(keys))


def test_help_lists_choices_once(monkeypatch, capsys):
    _, out, _ = called(monkeypatch, capsys, "export", "--help")
    text = " ".join(out.split())
    assert "with scales, for vLLM dtype=auto" in text  # its text names wide and fp8
    assert "precision.compute (auto, fp32, bf16, fp16)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evalute"], "evalute: there is no such command; did you mean 'evaluate'"),
        (["evaluate", "run_dri=x"], "unknown key run_dri; did you mean 'run_dir'"),
        (["plan", "steps=8"], "unknown key steps; did you mean train.steps"),
        (["prepare-data", "train.steps=8"], "unknown key train.steps; valid: verify"),
        (["--config-name", "own"], "config=FILE"),
        (["--config-dir", "theirs", "experiment=x"], "may run a program"),
        (["-cd=theirs", "experiment=x"], "may run a program"),
        (["--experimental-rerun=config.pickle"], "may run a program"),
        (["hydra.searchpath=[theirs]"], "may run a program"),
        (["plan", "hydra.searchpath=[theirs]"], "may run a program"),
        (["experiment=../../theirs"], "a choice is a name and no path; config=FILE"),
        (["+../theirs@_global_=x"], "a choice is a name and no path; config=FILE"),
        (["plan", "model=../../theirs"], "a choice is a name and no path; config="),
        (["precision=fp8"], "choose one of deepseek_fp8, fp8_current, fp8_delayed"),
        (["train.steps"], "'train.steps': expected key=value; --help lists the keys"),
        (["export", "dtype=fp8"], "dtype=fp8 is not a choice; valid: auto, bf16, fp16"),
        # integers that JAX lacks
        (["generate", "run_dir=x", "top_k=3000000000"], "at most 2147483647"),
        (["explain", "run_dir=x", f"batch={10**19}"], "at most 2147483647"),
        (["evaluate", "run_dir=x", "tasks=last_word", "batch=65537"], "at most 65536"),
        (["eval.batch_size=65537"], "eval.batch_size=65537: expected at most 65536"),
    ],
)
def test_mistyped_words_are_one_line_and_exit_code_2(
    arguments, message, monkeypatch, capsys
):
    code, out, err = called(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9\n..."),
            "ting 9)",
        ),
        (MemoryError(), "(MemoryError)"),
        (JaxRuntimeError("INTERNAL: a bug"), None),
    ],
)
def test_full_memory_is_one_line_and_exit_code_2(error, reason, capsys):
    def main():
        raise error

    if reason is None:
        with pytest.raises(JaxRuntimeError):
            run_and_flush(main)
        return
    assert run_and_flush(main) == 2
    message = capsys.readouterr().err
    assert f"{reason}; use a smaller batch" in message
    assert message.count("\n") == 1


def test_a_job_returns_its_last_validation_loss_for_sweepers(tmp_path):
    job = HydraJob(tmp_path, [], exit_code=0)
    assert validation_loss(job) is None
    rows = '{"step": 1, "val/loss": 3.0}\n{"step": 2, "val/loss": 2.5}\n{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert validation_loss(job) == 2.5
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val/loss": "NaN"}\n')
    assert math.isnan(validation_loss(job))
    assert validation_loss(HydraJob(tmp_path, [], exit_code=3)) == math.inf


def test_a_job_of_a_search_that_validated_on_other_text_is_refused(tmp_path):
    jobs = []
    for name, tokens in (("0", 900), ("1", 900), ("2", 1800)):
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(HydraJob(folder, ["train.batch_tokens=9"], exit_code=0))
        row = f'{{"step": 2, "tokens": 18, "val/loss": 2.5, "val/tokens": {tokens}}}\n'
        (folder / "metrics.jsonl").write_text(row)
        config = "train: {steps: 2, batch_tokens: 9}\n"
        (folder / "config.yaml").write_text(config)
        (folder / "environment.txt").write_text("validation digest: a\n")
    check_same_text(jobs[1], jobs[0])
    with pytest.raises(UserError, match="on more or less of it, so its loss counts as"):
        check_same_text(jobs[2], jobs[0])
    (tmp_path / "1" / "environment.txt").unlink()
    with pytest.raises(UserError, match="the run 1 does not name its validation text"):
        check_same_text(jobs[1], jobs[0])


def test_help_and_mistyped_keys_need_no_jax():
    lines = ["import sys", "from trainer.__main__ import command"]
    for name in COMMANDS:
        for word in ("--help", "no_such=1"):
            lines.append(f"sys.argv = ['scalify-trainer', {name!r}, {word!r}]")
            lines += ["try: command()", "except SystemExit: pass"]
            lines.append("assert 'jax' not in sys.modules, sys.argv")
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_closed_standard_streams_do_not_become_files_of_the_run(tmp_path):
    code = """
import os, sys
for number in (0, 1, 2):
    os.close(number)
from trainer.__main__ import open_streams
open_streams()
with open(sys.argv[1], "w") as file:
    print(file.fileno() > 2, file=file)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "log"], check=True)
    assert (tmp_path / "log").read_text() == "True\n"


def test_the_harness_is_named_our_files_and_no_folder_of_a_run(tmp_path):
    """Python of a stranger's run directory would run with a folder's tasks."""
    folder = tmp_path / "a run; [1]" / "tasks"
    folder.mkdir(parents=True)
    files = [folder / f"{name}.yaml" for name in ("last_word", "word_order")]
    for file in [*files, folder / "aaa.yaml"]:
        file.touch()
    arguments = shlex.split(harness_command(files))
    assert "--include_path" not in arguments
    names = arguments[arguments.index("--tasks") + 1].split(",")
    assert [glob.glob(name) for name in names] == [[str(file)] for file in files]
    assert arguments[-1] == ",".join(names)
    # The harness would take the parts of such a name for files of its own.
    assert "--tasks" not in harness_command([Path("x,evil.yaml/tasks/last_word.yaml")])


def test_a_line_end_of_windows_is_no_part_of_a_prompt(tmp_path):
    """Nor is it of a text that is trained on, or of standard input."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo \r\n")
    arguments = Prompts("run", prompts=str(tmp_path / "a.txt"))
    assert list(prompts_of(arguments)) == ["one", "", "two "]


def test_prompts_of_a_pipe_or_of_holes_are_refused(tmp_path):
    """A pipe was waited for, and three gigabytes of holes took seventeen."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(3 << 30)
    for name in ("pipe", "holes"):
        with pytest.raises(UserError):
            list(prompts_of(Prompts("run", prompts=str(tmp_path / name))))
