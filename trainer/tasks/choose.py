"""Tasks by name, offline ones and the harness's, made once and run for many models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.tasks import harness
from trainer.tasks.eval_model import EvalModel
from trainer.tasks.offline import BYTES, ITEMS, TASKS, Item, Scores, items_of
from trainer.text import how_to_install

BATCH = 16  # sequences at once by default


@dataclass(frozen=True)
class Tasks:
    """Tasks that are ready to run.

    Attributes:
      items: of the offline tasks, by name.
      others: names of the harness's tasks.
      known: the harness's task list; None without `others`.
      limit: examples of each of the harness's tasks; None: all.
      fewshot: examples shown; None: as many as a task says.
    """

    items: dict[str, list[Item]]
    others: tuple[str, ...]
    known: Any
    limit: int | None
    fewshot: int | None

    def scores(self, eval_model: EvalModel) -> dict[str, Scores]:
        """Return the scores by task and metric; UserError as in `harness.scores_of`."""
        scores = {
            name: TASKS[name].score(eval_model, items)
            for name, items in self.items.items()
        }
        if self.others:
            scores |= harness.scores_of(
                eval_model,
                self.others,
                self.known,
                limit=self.limit,
                fewshot=self.fewshot,
            )
        return scores


def choose_tasks(
    names: Sequence[str],
    text: Callable[[int], str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
) -> Tasks:
    """Return the tasks of these names.

    Args:
      names: of `offline.TASKS`, or of the harness.
      text: returns the start of the validation text, of about that many bytes.
      limit: items of each task at most; None: `ITEMS` of offline tasks, all of others.
      fewshot: examples shown, by the harness.

    Raises:
      UserError: an unknown name, a harness task without the package, or a text with too
          few items.
    """
    offline = [name for name in names if name in TASKS]
    others = tuple(name for name in names if name not in TASKS)
    # The harness's list takes seconds to read, so it is read for its own tasks only.
    known = None
    if others:
        if not harness.is_installed():
            raise UserError(
                f"tasks: {others[0]!r} is not one of {', '.join(TASKS)}, which need"
                " nothing; those of lm-evaluation-harness need its package:"
                f" {how_to_install('lm-eval')}"
            )
        known = harness.manager()
        # A wrong name is told here, before items are made or a model computes.
        harness.check_names(others, known)
    # The harness's tasks bring texts of their own, so nothing is decoded for them.
    start = text(BYTES) if offline else ""
    items = {name: items_of(name, start, limit or ITEMS) for name in offline}
    return Tasks(items, others, known, limit, fewshot)
