"""Runs killed on both sides of a border, of a stage of a mixture and of a phase, are
the runs that were not."""

import signal

from command import finish, parameters, trainer, values, wait_for_row

MIX = [
    "data=mix",
    "data.sources=[low.txt,up.txt]",
    "data.weights=[3,1]",
    "data.stages=[[4,1,3]]",
]
MIX += [
    "data.tokenizer=byte",
    "train.steps=8",
    "tracker=jsonl",
    "sample.max_new_tokens=0",
]
MIX += ["train.eval_every=4", "checkpoint.every=2"]
EMBEDDINGS = (
    "{until:6,trainable:[embeddings],lr:1e-2,schedule:constant,warmup_fraction:0}"
)
PHASED = [
    "train.steps=12",
    "tracker=jsonl",
    "sample.max_new_tokens=0",
    "train.eval_every=4",
    "checkpoint.every=4",
]
PHASED += ["checkpoint.keep=9", "schedule=wsd"]


def test_a_mixture_killed_on_both_sides_of_a_stage_is_the_same_run(tmp_path):
    (tmp_path / "low.txt").write_text("the cat sat on the mat. " * 800)
    (tmp_path / "up.txt").write_text("THE RAT SAT ON THE HAT! " * 800)
    finish(trainer(tmp_path, "A", *MIX))
    killed = []
    for row in (3, 4, 5):
        process = trainer(tmp_path, "B", *MIX)
        wait_for_row(tmp_path / "B", row, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        killed.append(process.returncode)
    assert killed[0] == -signal.SIGKILL
    finish(trainer(tmp_path, "B", *MIX))
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 8) == parameters(tmp_path / "B", 8)


def test_a_run_killed_on_both_sides_of_a_border_is_the_same_run(tmp_path):
    phases = f"train.phases=[{EMBEDDINGS},{{lr:1e-3,precision:scalify_fp8_fp16}}]"
    output = finish(trainer(tmp_path, "A", *PHASED, phases))
    assert "phase 1 of 2, steps 1 to 6: embeddings (" in output
    assert "phase 2 of 2, steps 7 to 12: all (" in output
    killed = []
    for row in (5, 6, 9):
        process = trainer(tmp_path, "B", *PHASED, phases)
        wait_for_row(tmp_path / "B", row, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        killed.append(process.returncode)
    assert killed[0] == -signal.SIGKILL
    finish(trainer(tmp_path, "B", *PHASED, phases))
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 12) == parameters(tmp_path / "B", 12)
