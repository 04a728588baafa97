"""Totals go on from those of a checkpoint, whatever the settings are now."""

from dataclasses import asdict

from trainer.run.totals import Totals, continued_totals


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
