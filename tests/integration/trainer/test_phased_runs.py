"""A run in phases: what each trains, and the same bits when it is stopped on both
sides of a border."""

import pytest
from command import crashed_after, here, parameters, stopped_after, values

from trainer.assembly.saved_model import restore_run
from trainer.report.page import arithmetic
from trainer.report.run_records import RunRecords

EMBEDDINGS = (
    "{until:6,trainable:[embeddings],lr:1e-2,schedule:constant,warmup_fraction:0}"
)
ARGS = [
    "train.steps=12",
    "train.eval_every=4",
    "checkpoint.every=4",
]
ARGS += ["checkpoint.keep=9", "schedule=wsd"]


def test_a_name_that_is_no_parameter_s_ends_the_run_before_it_begins(tmp_path):
    phases = "train.phases=[{until:6,trainable:[embedings]},{}]"
    assert "train.trainable: 'embedings' matches no parameter" in here(
        tmp_path, "A", *ARGS, phases, code=2
    )
    assert not (tmp_path / "A").exists()


@pytest.mark.slow  # its border: precision/test_kahan.py; stops: test_library.py
def test_a_run_stopped_on_both_sides_of_a_border_is_the_same_run(tmp_path):
    phases = f"train.phases=[{EMBEDDINGS},{{lr:1e-3,precision:bf16_pure}}]"
    output = here(tmp_path, "A", *ARGS, phases)
    assert "phase 1 of 2, steps 1 to 6: embeddings (" in output
    assert "phase 2 of 2, steps 7 to 12: all (" in output
    facts = RunRecords.read(tmp_path / "A").facts
    assert facts["arithmetic"].startswith("matmuls in bf16; weights bf16")
    head = arithmetic(RunRecords.read(tmp_path / "A"))
    assert head.startswith("precision bf16_pure: matmuls in bf16; weights bf16")
    assert head.endswith("; this is the last phase; before it: fp32")
    assert restore_run(tmp_path / "A").precisions == ["fp32", "bf16_pure"]
    assert restore_run(tmp_path / "A", "6").precisions == ["fp32"]
    stopped_after(tmp_path, "B", 5, *ARGS, phases)
    crashed_after(tmp_path, "B", 7, *ARGS, phases)
    here(tmp_path, "B", *ARGS, phases)
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 12) == parameters(tmp_path / "B", 12)
    four, border, end = (weights_of(tmp_path / "A", step) for step in (4, 6, 12))
    moved = {name for name in four if four[name] != border[name]}
    assert moved == {name for name in four if "embedding" in name}
    assert not [name for name in border if border[name] == end.get(name)]
    saved = parameters(tmp_path / "A", 6)
    moments = [name for name in saved if name.startswith("opt_state")]
    assert not [name for name in moments if "kernel" in name]


# its arithmetic: unit/trainer/precision/test_blocks.py; borders: precision/test_kahan.py
@pytest.mark.slow
def test_four_bits_end_with_a_wide_forward_pass(tmp_path):
    """The late switch of NVIDIA's recipe, as docs/precision.md has it."""
    given = [
        "train.eval_every=0",
        "checkpoint.every=0",
        "schedule=constant",
        "schedule.warmup_fraction=0",
        "precision=nvfp4",
        "precision.wide_ends=null",
    ]
    phases = (
        "train.phases=[{until:2},{precision:{name:nvfp4_wide_forward,wide_ends:null},"
        "schedule:linear,warmup_fraction:0,min_ratio:0}]"
    )
    output = here(tmp_path, "A", *given, "train.steps=4", phases)
    assert "4 of 4 linear layers in e2m1/e2m1" in output
    assert "phase 2 of 2, steps 3 to 4" in output
    here(tmp_path, "B", *given, "train.steps=3")
    switched, narrow = (
        [row["train/loss"] for row in values(tmp_path / name)] for name in "AB"
    )
    assert switched[:2] == narrow[:2]
    assert switched[2] != narrow[2]


def weights_of(run_dir, step):
    """The checksums of the parameters' data, whatever their form."""
    leaves = parameters(run_dir, step)
    return {
        name: leaf["checksum"]
        for name, leaf in leaves.items()
        if name.startswith("params") and "scale" not in name.split("/")[-1:]
    }
