"""Runs with DiLoCo, as users start them: in one process or two, interrupted in a round,
read afterwards."""

import shutil

import jax
from command import finish, parameters, several, trainer, values

from trainer.assembly.saved_model import restore_run

REPLICA = [
    "parallel=diloco",
    "diloco.replicas=2",
    "diloco.sync_every=3",
    "train.steps=7",
    "train.eval_every=4",
    "checkpoint.every=4",
    "checkpoint.keep=9",
]


def test_replicas_in_processes_of_their_own_are_bitwise_those_of_one_and_resume_inside_a_round(
    tmp_path,
):
    output = finish(trainer(tmp_path, "one", *REPLICA, devices=2))
    assert "mesh replica 2 x data 1 x fsdp 1 x tensor 1" in output
    assert "2 replicas exchange outer gradients in fp8 every 3 steps" in output
    outputs = [
        finish(process) for process in several(tmp_path, "two", *REPLICA, devices=1)
    ]
    assert "devices: 2 x cpu in 2 processes" in outputs[0]
    assert values(tmp_path / "one") == values(tmp_path / "two")
    # Replicas inside a round, residuals and momentum among them, and all at the end.
    for step in (4, 7):
        assert parameters(tmp_path / "one", step) == parameters(tmp_path / "two", step)
    assert any(
        name.startswith("diloco/residuals/") for name in parameters(tmp_path / "one", 4)
    )

    # On one device, from the checkpoint between the exchanges after steps 3 and 6.
    shutil.copytree(tmp_path / "one", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "7")
    assert "resuming after step 4" in finish(trainer(tmp_path, "again", *REPLICA))
    losses = [
        [row["train/loss"] for row in values(tmp_path / name)]
        for name in ("one", "again")
    ]
    # a validation on one device adds up its batches in another order than on two
    assert losses[0] == losses[1]
    assert parameters(tmp_path / "again", 7) == parameters(tmp_path / "one", 7)

    rows = values(tmp_path / "one")
    assert rows[3]["wire/exchanged_mib"] > 0
    assert 9 < rows[6]["wire/times_fewer"] < 12  # two rounds and a step, in FP8
    # What reads the run sees the outer weights, and nothing of replicas.
    saved = parameters(tmp_path / "one", 7)
    shapes = sorted(
        leaf["shape"] for name, leaf in saved.items() if name.startswith("params/")
    )
    assert (
        sorted(
            list(x.shape) for x in jax.tree.leaves(restore_run(tmp_path / "one").params)
        )
        == shapes
    )
