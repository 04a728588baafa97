"""Messages about a run: changes of its schedule and batches, the data that it reads,
and the facts of its environment.txt."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from precisions import ADAMW

from trainer.assembly.startup_log import (
    ScheduleChange,
    describe_change,
    with_schedule_change,
)
from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.data import get_tokenizer
from trainer.parallel.mesh import make_mesh
from trainer.report.messages import facts_of
from trainer.run.checkpoint import Restored
from trainer.step.schedule import BLOCK, LearningRates
from trainer.workload import Model, TrainTask, Workload


def rates(*values):
    table = np.float32(values)
    return LearningRates(lambda i: table[np.minimum(i, len(table) - 1)], len(table))


def test_a_changed_schedule_is_told_by_its_learning_rates():
    old, new = rates(4, 3, 2, 1), rates(4, 3.5, 3, 2.5, 2, 1.5, 1)
    (line,) = ScheduleChange(4, "train.steps=7, was 4", old, new, False).describe()
    assert "train.steps=7, was 4)" in line
    assert "from 1.00e+00 in step 4 to 2.00e+00 in step 5" in line
    # only the warm-up, which is over, was another
    old, new = rates(1, 2, 2, 2, 2), rates(2, 2, 2, 2)
    assert ScheduleChange(3, "", old, new, True).describe() == []
    # it ends here
    assert ScheduleChange(4, "", old, rates(4, 3, 2, 1), True).describe() == []


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            4096,
            "continue at token 81,920, not 40,960; the 40,960 tokens between are left",
        ),
        (
            1024,
            "continue at token 20,480, not 40,960; the 20,480 tokens between are seen",
        ),
    ],
)
def test_another_batch_size_says_which_data_come_next(tokens, says):
    keys = ["train.steps=40", "schedule=constant", "schedule.warmup_fraction=0"]
    old = compose_config([*keys, "train.batch_tokens=2048", "run_dir=a"])
    new = compose_config([*keys, f"train.batch_tokens={tokens}", "run_dir=b"])
    checkpoint = Restored(20, None, {"config": to_tree(old)})
    (line,) = describe_change(new, *with_schedule_change(new, checkpoint))
    assert says in line
    assert describe_change(old, *with_schedule_change(old, checkpoint)) == []


def resumed(old, new, step):
    checkpoint = Restored(step, None, {"config": to_tree(compose_config(old))})
    return with_schedule_change(compose_config(new), checkpoint)[1]


def test_a_configuration_of_very_many_steps_takes_no_memory_for_them():
    tracemalloc.start()
    try:
        change = resumed(["train.steps=100000000"], ["train.steps=90000000"], 30)
        assert change.is_past  # by its warm-up
        assert change.new_rates[89_999_999] > 0
        assert tracemalloc.get_traced_memory()[1] < 10 << 20  # bytes
    finally:
        tracemalloc.stop()


def test_a_schedule_is_another_where_one_step_taken_has_another_rate():
    keys = ["schedule.warmup_fraction=0", "schedule=wsd", "optimizer.lr=1e-3"]
    steps = 4 * BLOCK
    old = [*keys, f"train.steps={steps}", "schedule.decay_fraction=0.5"]
    new = [*keys, f"train.steps={2 * steps}", "schedule.decay_fraction=0.5"]
    # The decay begins after 2 blocks; its first rate is the peak.
    assert not resumed(old, new, steps // 2 + 1).is_past
    assert resumed(old, new, steps // 2 + 2).is_past
    assert resumed(old, new, steps + 1).is_past  # more than the saved steps


@pytest.mark.parametrize(
    ("words", "is_emulated"),
    [
        (["precision=bf16"], False),
        (["precision=fp8_current"], True),
        (["precision=bf16", "precision.attention=e4m3"], True),
    ],
)
def test_the_facts_say_that_a_cpu_emulates_fp8_in_matmuls_or_attention(
    words, is_emulated
):
    heads_of_128 = ["model=llama_nano", "model.n_head=1", "model.n_kv_head=1"]
    config = compose_config([*heads_of_128, *words])
    model = Model.make(config.model.spec(256), config.precision.policy)
    manifest = SimpleNamespace(
        source={"kind": "embedded"},
        token_count={"train": 9000, "val": 1000}.get,
        validation_content="0a",
    )
    data = SimpleNamespace(manifest=manifest, tokenizer=get_tokenizer("byte"))
    facts = facts_of(Workload(TrainTask(model, ADAMW, make_mesh(1, 1)), data, 0))
    assert ("CPUs emulate FP8" in facts["arithmetic"]) == is_emulated
    assert facts["training tokens"] == "9,000"
    assert facts["validation tokens"] == "1,000"
