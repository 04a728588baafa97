"""Tasks at a cadence, in a run."""

import json

import pytest
from command import here, values

from trainer.cli.evaluate import Arguments, main

TASKS = [
    "eval.tasks=[last_word]",
    "eval.tasks_every=15",
    "eval.limit=12",
    "eval.batch_size=4",
    "train.steps=20",
]


@pytest.mark.slow  # the scores: tasks/
def test_a_run_scores_tasks_and_so_does_what_is_left_of_it(tmp_path):
    here(tmp_path, "run", *TASKS, "parallel.fsdp=2")
    scored = {
        row["step"]: row
        for row in values(tmp_path / "run")
        if "tasks/last_word/acc" in row
    }
    assert list(scored) == [15, 20]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # where its data are
        main(Arguments(str(tmp_path / "run"), tasks="last_word", limit=12, batch=6))
    [result] = json.loads((tmp_path / "run" / "tasks.json").read_text())["results"]
    actual, logged = (
        result["tasks"]["last_word"]["perplexity"]["value"],
        scored[20]["tasks/last_word/perplexity"],
    )
    # e^(nats of a word): of some 6 tokens' sums, in other batches.
    assert actual == pytest.approx(logged, rel=6 * 5 * 2.0**-11)


def test_a_task_that_there_is_not_ends_a_run_before_it_begins(tmp_path):
    output = here(tmp_path, "run", "eval.tasks=[last_wrd]", code=2)
    assert "'last_wrd' is n" in output
    assert not (tmp_path / "run" / "checkpoints").exists()
