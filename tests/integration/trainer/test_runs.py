"""Runs in this process: how they begin, go on, are forked and end, and what they
refuse."""

import logging
import re
import shutil

import jax
import numpy as np
import pytest
from command import CACHE, TINY, here, parameters, values
from tokenizers import Tokenizer

from trainer.assembly import training as build
from trainer.assembly.saved_model import restore_run
from trainer.cli.export import Arguments as Export
from trainer.cli.export import main as export
from trainer.cli.export import model_card
from trainer.cli.train import main
from trainer.observe.records import read_rows
from trainer.report.run_records import RunRecords


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["train.steps=10"], ["train.steps=10", "20"]),
        (["resume=none"], ["holds checkpoints", "resume=none"]),
        (
            ["run_dir=new", "resume=A", "model.n_head=4"],
            ["resume=A has n_head=2", "the model 4", "model.n_head=2"],
        ),
        (
            [
                "run_dir=new",
                "resume=A",
                "resume.convert=true",
                "precision=scalify_fp8",
                "optimizer=lion",
            ],
            ["resume=A was trained with optimizer=adamw", "lion", "init_from=A"],
        ),
        (
            ["run_dir=new", "resume=A", "precision=scalify_fp8"],
            ["precision.forward=None", "resume.convert=true"],
        ),
        (
            [
                "run_dir=new",
                "init_from=A",
                "model.n_head=4",
                "model.d_model=64",
                "data.tokenizer=bpe",
            ],
            [
                "n_head=2 (the model 4)",
                "d_model=32 (the model 64)",
                "tokenizer byte of 256",
                "data.tokenizer=byte",
            ],
        ),
        (["run_dir=new", "model=from_init"], ["init_from, which is null"]),
        (["run_dir=new", "eval.tasks=[last_wrd]"], ["'last_wrd' is n"]),
        (
            ["run_dir=new", "model=from_init", "init_from=A", "model.n_layer=3"],
            ["model.n_layer=3 (1 in init_from)"],
        ),
        (
            ["run_dir=new", "resume=A", "train.steps=20"],
            ["train.steps=20", "checkpoint has 20", "21 or more"],
        ),
        (
            ["run_dir=new", "parallel.data=3"],
            ["16 sequences", "3 parts", "train.batch_tokens"],
        ),
        (
            ["run_dir=new", "parallel.distributed=true"],
            ["processes", "JAX_COORDINATOR_ADDRESS"],
        ),
        (
            [
                "run_dir=new",
                "data=text",
                "data.tokenizer=byte",
                "data.paths=[short.txt]",
            ],
            ["33"],
        ),
        (["run_dir=" + 300 * "n"], ["nnn: File name too long"]),
    ],
)
def test_what_cannot_run_is_one_line_exit_code_2_and_nothing_is_lost(
    beside, monkeypatch, capfd, args, names
):
    directory, before = beside
    monkeypatch.chdir(directory)
    # Hydra's, which would outlive this test's captured output
    monkeypatch.setattr(logging.root, "handlers", [])
    given = ["run_dir=A", "parallel.data=1", "train.steps=30", "compile_cache=null"]
    code = main([*TINY, *given, *args])
    output = capfd.readouterr().err.strip().splitlines()
    # which a slow machine reports on
    errors = [line for line in output if not line.startswith("preparing data")]
    assert code == 2
    assert len(errors) == 1, output
    assert errors[0].startswith("error: ")
    for name in names:
        assert name in errors[0]
    assert values(directory / "A") == before
    assert not (directory / "new").exists()


@pytest.fixture(scope="module")
def beside(finished_run):
    """The finished run's directory, with files beside it that nobody can train on."""
    folder, _ = finished_run
    (folder / "short.txt").write_text("short")
    (folder / "bpe").mkdir()
    (folder / "bpe" / "vocab.bpe").write_text("t h\nth e\n")
    return finished_run


def test_a_finished_run_is_left_alone_extended_or_forked(finished_run):
    tmp_path, rows = finished_run
    assert "Bokeh" in (tmp_path / "A" / "report.html").read_text()
    # of an attempt that died before its first checkpoint
    (tmp_path / "F").mkdir()
    shutil.copy(tmp_path / "A" / "metrics.jsonl", tmp_path / "F")
    (tmp_path / "F" / "evaluation.json").write_text('{"step": 20}')
    settings = (tmp_path / "A" / "config.yaml").read_text()
    settings = re.sub("batch_tokens: .*", "batch_tokens: 1024", settings)
    (tmp_path / "F" / "config.yaml").write_text(settings)
    larger = "train.batch_tokens=1024"
    output = here(tmp_path, "F", "train.steps=22", "resume=A", larger)
    assert "its old log is now metrics.jsonl.old" in output
    assert not (tmp_path / "F" / "evaluation.json").exists()
    rate = f"the learning rate goes from {rows[-1]['lr']:.2e} in step 20 to "
    assert f"train.steps=22, was 20): {rate}" in output
    assert [row["step"] for row in values(tmp_path / "F")] == [21, 22]
    # those that were read, in batches of either size
    tokens = rows[-1]["tokens"] + 2 * 1024
    assert values(tmp_path / "F")[-1]["tokens"] == tokens
    card = model_card(restore_run(tmp_path / "F"), "fp32", "AutoTokenizer")
    assert f": 22 steps, {tokens:,} tokens in all." in card
    assert "a fork of the run `A` after step 20" in card
    forked = "forked from A after step 20"
    assert forked in output
    output = here(tmp_path, "F", "train.steps=23", larger)
    assert "resuming after step 22" in output
    events = [e for e in read_rows(tmp_path / "F" / "metrics.jsonl") if "event" in e]
    change = "changed after step 22 (train.steps=23, was 22)"
    assert events == [
        {"step": 21, "event": forked},
        {"step": 23, "event": f"the learning-rate schedule {change}"},
    ]
    assert forked in (tmp_path / "F" / "report.html").read_text()


def test_a_run_goes_on_and_is_forked_from_any_step_by_its_directory_alone(
    finished_run, monkeypatch
):
    tmp_path, rows = finished_run
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    shutil.copytree("A", "M")
    assert main(["resume=M", "train.steps=22"]) == 0
    assert [row["step"] for row in values(tmp_path / "M")] == list(range(1, 23))
    assert values(tmp_path / "M")[:20] == rows
    change = "after step 20 (train.steps=22, was 20)"
    events = [e for e in read_rows(tmp_path / "M" / "metrics.jsonl") if "event" in e]
    text = f"the learning-rate schedule changed {change}"
    assert events == [{"step": 21, "event": text}]
    assert RunRecords.read(tmp_path / "M").facts["schedule changed"] == change
    assert main(["resume=A", "resume.step=10", "run_dir=N"]) == 0
    repeated = values(tmp_path / "N")
    assert repeated == rows[10:]  # nothing was changed: the same steps, bit for bit
    assert parameters(tmp_path / "N", 20) == parameters(tmp_path / "A", 20)


@pytest.mark.slow  # test_config.py has a sweep, trainer/report its table
def test_a_sweep_ends_with_a_table_and_its_runs_know_their_own_settings(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    given = ["train.steps=2", "parallel.data=1", "run_dir=S", CACHE]
    sweep = ["optimizer.lr=1e-3,1e-2", "--multirun", "seed=0,1"]
    assert main([*TINY, *given, *sweep]) == 0
    out = capfd.readouterr().out
    told = f"\nrun 2 (job 3 of 4): optimizer.lr=0.01 seed=0, in {tmp_path}/S/2\n"
    assert told in out
    table, rest = (part.splitlines() for part in out.split("\n\n")[-2:])
    assert table[0].split()[:3] == ["optimizer.lr", "seed", "validation"]
    assert sorted(line.split()[0] for line in table[1:5]) == ["0", "1", "2", "3"]
    losses = [float(line.split()[3]) for line in table[1:5]]
    assert losses == sorted(losses)
    assert rest[0].startswith(
        f"best: {tmp_path}/S/{table[1].split()[0]} (validation loss "
    )
    assert [line.split()[-1] for line in rest[2:4]] == ["2", "2"]  # seeds of each rate
    assert (tmp_path / "S" / "sweep.html").exists()
    # not the settings of the whole sweep
    assert f"resume={tmp_path}/S/3 train.steps=4" in out
    text = (tmp_path / "S" / "3" / "environment.txt").read_text()
    assert {"optimizer.lr=0.01", "seed=1"} <= set(text.split())
    assert RunRecords.read(tmp_path / "S" / "3").name == "S/3 optimizer.lr=0.01 seed=1"


def test_a_run_compiles_its_train_step_and_its_validation_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.undo()  # what other runs have compiled
    args = ["train.steps=4", "train.eval_every=2", "checkpoint.every=2"]
    args += ["tracker=none", "compile_cache=null"]
    logger = logging.getLogger("jax")
    logger.addHandler(caplog.handler)
    with jax.log_compiles():
        here(tmp_path, "A", *args)
    logger.removeHandler(caplog.handler)
    compiled = re.findall(r"Finished XLA compilation of (?:jit\()?(\w+)", caplog.text)
    assert compiled.count("train_step") == 1, compiled
    assert compiled.count("eval_step") == 1, compiled


def test_dry_run_describes_and_leaves_nothing(tmp_path):
    args = ["parallel=diloco", "diloco.replicas=2", "diloco.bandwidth_gbps=5"]
    output = here(tmp_path, "none", "dry_run=true", *args)
    assert "parameters" in output
    assert "memory per device" in output
    assert re.search(r"an exchange takes about .* s at 5 Gbit/s", output)
    assert not (tmp_path / "none").exists()


def test_a_diverging_run_skips_then_stops_with_exit_code_3_and_names_the_first_bad_tensor(
    tmp_path,
):
    args = [
        "optimizer=sgd",
        "optimizer.lr=1e30",
        "optimizer.clip_norm=0",
        "watchdog.max_skips=3",
    ]
    output = here(tmp_path, "A", "train.steps=20", *args, code=3)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "3 steps in a row were not finite" in error
    assert "divergence.txt" in error
    assert "Traceback" not in output
    assert "float32" in (tmp_path / "A" / "divergence.txt").read_text()
    skipped = list((tmp_path / "A" / "skipped").glob("*.npy"))
    assert [np.load(path).shape for path in skipped] == [(16, 33)] * 3
    assert any("event" in row for row in read_rows(tmp_path / "A" / "metrics.jsonl"))


@pytest.mark.slow  # two runs; what a profile says: scripts/test_kernel_times.py
def test_a_profile_is_written_also_of_steps_that_a_resumed_run_has_only_the_rest_of(
    tmp_path,
):
    args = ["tracker=none", "checkpoint.every=0"]
    for count, (steps, last) in enumerate(((4, 4), (8, 7)), 1):
        here(tmp_path, "A", f"train.steps={steps}", f"profile.steps=[2,{last}]", *args)
        assert len(list((tmp_path / "A" / "profile").rglob("*.xplane.pb"))) == count


def test_ctrl_c_before_the_first_step_is_one_line_and_leaves_nothing(
    tmp_path, monkeypatch, capfd
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "build_phases", interrupted)
    assert main([*TINY, "run_dir=A", "compile_cache=null"]) == 130
    errors = capfd.readouterr().err.splitlines()
    assert errors == ["error: interrupted before the first step; nothing was trained"]
    assert not list(tmp_path.iterdir())


# a model of the architecture of given weights
FROM_INIT = ["model=from_init", "init_from=A"]
FROM_INIT += [
    f"model.{key}=null" for key in ("n_layer", "n_head", "d_model", "context")
]


def test_fine_tuning_starts_from_a_run_or_a_hugging_face_directory(finished_run):
    tmp_path, rows = finished_run
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        export(Export("A", "exported"))
    args = ["train.steps=1", "model.dropout=0"]
    here(tmp_path, "I", *args, "init_from=exported")
    output = here(tmp_path, "K", *args, *FROM_INIT)
    assert "1 layer, width 32, context 32, vocabulary 256" in output
    assert "it is not checked" not in output
    assert "weights from A after its step 20: " in output
    assert "weights from A" in (tmp_path / "K" / "report.html").read_text()
    ours, theirs = (values(tmp_path / run)[0]["train/loss"] for run in "IK")
    assert ours == theirs  # the same weights, bit for bit
    assert ours < rows[0]["train/loss"] - 0.1
    read = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    assert read.encode("In the é").ids == list("In the é".encode())


def test_a_short_validation_text_that_other_devices_cut_elsewhere_is_said(tmp_path):
    (tmp_path / "short.txt").write_text("In the beginning. " * 1200)
    args = ["data=text", "data.paths=[short.txt]", "data.val_fraction=0.02"]
    args += ["data.tokenizer=byte"]
    args += ["tracker=jsonl", "sample.max_new_tokens=0", "train.batch_tokens=512"]
    here(tmp_path, "A", "train.steps=1", *args)
    output = here(tmp_path, "A", "train.steps=2", "parallel.data=8", *args)
    rows = "a batch of the validation has 8 sequences of its text (was 13)"
    assert f"resumed after step 1 on other devices, where {rows}" in output
    tokens = [row["val/tokens"] for row in values(tmp_path / "A")]
    assert tokens == [13 * 32, 8 * 32]


def test_the_last_checkpoint_is_compared_on_the_batches_of_every_validation(tmp_path):
    args = [
        "optimizer.lr=0",
        "train.eval_every=2",
        "checkpoint.every=2",
        "train.final_eval_batches=6",
        "tracker=none",
    ]
    output = here(tmp_path, "A", "train.steps=4", *args)
    first, last = (
        (tmp_path / "A" / "checkpoints" / step / "metrics" / "metrics").read_text()
        for step in "24"
    )
    # the weights are the same, and 6 batches have another mean than 2
    assert first == last
    (line,) = [line for line in output.splitlines() if line.startswith("done: ")]
    # with tracker=none there is nothing else
    assert line.endswith(": checkpoints, config.yaml")
