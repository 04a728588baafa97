"""Several real processes on one machine: the same run as one process, stopped together,
writing once."""

import numpy as np
import pytest
from command import finish, here, parameters, several, trainer, values, wait_for_row

ARGS = [
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "train.steps=6",
    "parallel.deterministic_reduce=true",
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder with the run `one` of four devices in a process, and `two` in two
    processes, and the output of those."""
    folder, args = tmp_path_factory.mktemp("processes"), [*ARGS, "parallel=fsdp"]
    finish(trainer(folder, "one", *args, devices=4))
    return folder, [finish(process) for process in several(folder, "two", *args)]


def test_two_processes_are_bitwise_one(both):
    folder, outputs = both
    assert ["done: 6 steps" in output for output in outputs] == [True, False]
    assert (
        "devices: 4 x cpu in 2 processes; mesh data 1 x fsdp 4 x tensor 1" in outputs[0]
    )
    assert values(folder / "one")[:6] == values(folder / "two")[:6]
    assert parameters(folder / "one", 6) == parameters(folder / "two", 6)


def test_a_run_goes_on_with_other_devices(both):
    """From four devices that share the state to two that do not, and to four in two
    rows."""
    folder, _ = both
    more = ["train.steps=8", "parallel.data=2"]
    output = here(folder, "one", *ARGS, *more)
    assert "resumed after step 6 on other devices: 2 x cpu in 1 process" in output
    here(folder, "two", *ARGS, *more, "parallel.fsdp=2")
    one, two = values(folder / "one"), values(folder / "two")
    assert [row["step"] for row in two] == list(range(1, 9))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(
            b["train/loss"], a["train/loss"], rtol=1e4 * np.finfo(np.float32).eps
        )


def test_embedding_rows_are_made_where_processes_share_the_weights(tmp_path):
    """Each of them has a part of the old table and of the new one."""
    args = ["train.steps=1", "checkpoint.every=1"]
    here(tmp_path, "A", *args)
    start = ["parallel=fsdp", "init_from=A", "init.embeddings=mean"]
    outputs = [finish(p) for p in several(tmp_path, "B", *args, *start)]
    assert "weights from A, init.embeddings=mean" in outputs[0]


def test_a_signal_to_one_of_the_processes_stops_all_after_the_same_step(tmp_path):
    args = [
        "train.steps=100000",
        "checkpoint.every=0",
        "train.eval_every=0",
    ]
    processes = several(tmp_path, "A", *args, "parallel=fsdp")
    wait_for_row(tmp_path / "A", 5, processes[0])
    processes[1].terminate()
    outputs = [finish(process, code=143) for process in processes]
    assert ["stopped after step" in output for output in outputs] == [True, False]
    (checkpoint,) = (tmp_path / "A" / "checkpoints").glob("[0-9]*")
    step = int(checkpoint.name)
    assert f"stopped after step {step} of" in outputs[0]
    assert [row["step"] for row in values(tmp_path / "A")] == list(range(1, step + 1))
    assert parameters(tmp_path / "A", step)


def test_processes_that_diverge_skip_together_and_say_why_once(tmp_path):
    args = [
        "optimizer=sgd",
        "optimizer.lr=1e30",
        "optimizer.clip_norm=0",
        "watchdog.max_skips=2",
        "train.steps=20",
    ]
    processes = several(tmp_path, "A", *args)
    outputs = [finish(process, code=3) for process in processes]
    assert all("2 steps in a row were not finite" in output for output in outputs)
    assert not any("Traceback" in output for output in outputs)
    assert (tmp_path / "A" / "divergence.txt").exists()
    skipped = sorted((tmp_path / "A" / "skipped").glob("*.npy"))
    assert len(skipped) == 2
    # the whole batch, not the rows of one process
    assert np.load(skipped[0]).shape == (16, 33)


def test_a_process_that_fails_ends_at_once_and_waits_for_no_other(tmp_path):
    broken = {"JAX_PLATFORMS": "cpu_that_is_not_there", "XLA_FLAGS": ""}
    healthy, failed = several(
        tmp_path, "A", "train.steps=100000", devices=1, last=broken
    )
    try:
        # JAX would wait for more than two minutes
        output, _ = failed.communicate(timeout=90)
        assert failed.returncode == 1, output
        assert "Unable to initialize backend" in output
        assert healthy.poll() is None
    finally:
        healthy.kill()
        healthy.communicate()


def with_text(tmp_path, other):
    """Two processes, the second of which is given another file of text."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"process {name} has this. " * 2000)
    args = ["train.steps=100000", "data=text", "data.tokenizer=byte"]
    args.append("data.paths=[one.txt]")
    last_args = [f"data.paths=[{other}.txt]"]
    return several(tmp_path, "new", *args, devices=1, last_args=last_args)


def test_a_process_that_is_refused_alone_ends_the_others_with_a_line(tmp_path):
    others, refused = with_text(tmp_path, "not_here")
    # JAX would wait for the others for minutes
    output, _ = refused.communicate(timeout=100)
    assert refused.returncode == 2, output
    assert "error: " in output
    assert "not_here.txt" in output
    output, _ = others.communicate(timeout=100)
    assert others.returncode == 1, output
    (error,) = output[output.index("error: ") :].splitlines()  # none of Hydra
    assert error.startswith("error: another process of this run ended"), output
    assert "Traceback" not in output
    assert "Error executing job" not in output


def test_processes_that_read_other_files_are_refused_together(tmp_path):
    """Other weights, settings, checkpoints and directories: unit/trainer/parallel."""
    outputs = [finish(process, code=2) for process in with_text(tmp_path, "two")]
    assert "the data: process" in outputs[0]
    assert all(output.count("error: ") == 1 for output in outputs)
    assert not (tmp_path / "new").exists()
