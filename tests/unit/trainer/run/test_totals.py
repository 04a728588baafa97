"""Totals go on from those of a checkpoint, whatever the settings are now."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from trainer.assembly.build import build_totals
from trainer.config.composition import compose_config
from trainer.run.checkpoint_formats import as_current
from trainer.run.metadata import Totals
from trainer.run.totals import continued_totals


def per_step(tokens, exchanged=0.0, samples=()):
    return lambda step: Totals(
        step * tokens,
        step * exchanged,
        2 * step * exchanged,
        tuple(step * count for count in samples),
    )


def test_steps_count_with_the_settings_that_they_were_taken_with():
    first = continued_totals({}, 0, per_step(256, 10.0, (6, 2)))
    assert first(40) == per_step(256, 10.0, (6, 2))(40)
    meta = {"totals": asdict(first(40))}
    second = continued_totals(meta, 40, per_step(512, 30.0, (4, 4)))
    assert second(50) == Totals(15_360, 700.0, 1400.0, (280, 120))
    assert continued_totals({"totals": asdict(second(50))}, 50, per_step(1))(
        50
    ) == Totals(15_360, 700.0, 1400.0)


def test_totals_from_somebody_else_may_lack_parts():
    assert continued_totals({"totals": {"tokens": 9}}, 1, per_step(4))(2) == Totals(13)


def test_a_checkpoint_of_format_3_is_counted_by_its_configuration():
    saved = Path(__file__).parents[3] / "data" / "saved_by_7ef3f38" / "fp32"
    file = saved / "checkpoints" / "2" / "manifest" / "metadata"
    meta = as_current(json.loads(file.read_text()))["meta"]
    assert continued_totals(meta, 2, per_step(1000))(3) == Totals(2 * 256 + 1000)


def test_samples_of_another_number_of_sources_are_counted_anew():
    saved = {"totals": asdict(per_step(256)(40))}
    totals = continued_totals(saved, 40, per_step(256, samples=(6, 2)))
    assert totals(50) == Totals(50 * 256, samples=(60, 20))


def test_replicas_that_do_not_take_part_train_on_nothing():
    c = compose_config(["experiment=federated_fp8", "train.batch_tokens=8192"])
    task, data = SimpleNamespace(diloco=None), SimpleNamespace(train=None)
    totals = build_totals(c, SimpleNamespace(task=task, data=data))
    assert totals(10).tokens == 10 * 8192 * 3 // 8
