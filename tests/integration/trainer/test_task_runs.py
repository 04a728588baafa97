"""Tasks at a cadence, in a run."""

from command import here


def test_a_task_that_there_is_not_ends_a_run_before_it_begins(tmp_path):
    output = here(tmp_path, "run", "eval.tasks=[last_wrd]", code=2)
    assert "'last_wrd' is n" in output
    assert not (tmp_path / "run" / "checkpoints").exists()
