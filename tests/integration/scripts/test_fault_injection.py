"""What happens to a run is kept account of."""

from scripts.faults.fault_injection import damage, unnoticed
from scripts.faults.victim import Victim


def test_a_damaged_checkpoint_that_the_run_has_not_set_aside_is_named(tmp_path):
    run = Victim([], tmp_path, "disturbed", {})
    folder = run.run_dir / "checkpoints"
    for step in (20, 40):
        (folder / str(step) / "manifest").mkdir(parents=True)
        (folder / str(step) / "manifest" / "metadata").write_bytes(b"whole")
    damage(run, lambda data: b"")
    assert len((folder / "40" / "manifest" / "metadata").read_bytes()) < 5
    assert unnoticed(run) == [40]
    (folder / "damaged" / "40-loss-0").mkdir(parents=True)
    assert unnoticed(run) == [40]
    (folder / "damaged" / "40-0").mkdir()
    assert unnoticed(run) == []
    run.damaged.append(40)
    assert unnoticed(run) == [40]
