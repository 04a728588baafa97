"""The tasks that are named, offline ones and those of the harness, made once and asked
as often as one likes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.tasks import harness
from trainer.tasks.eval_model import EvalModel
from trainer.tasks.offline import BYTES, ITEMS, TASKS, Item, Scores, items_of

BATCH = 16  # sequences at once, by default


@dataclass(frozen=True)
class Tasks:
    """Tasks that are ready to be asked.

    Attributes:
      items: of the offline ones, by name.
      others: names of the harness's.
      known: the harness's list; None without `others`.
      limit: examples of each of the harness's; None: all.
      fewshot: examples shown; None: as many as a task says.
    """

    items: dict[str, list[Item]]
    others: tuple[str, ...]
    known: Any
    limit: int | None
    fewshot: int | None

    def scores(self, eval_model: EvalModel) -> dict[str, Scores]:
        """The scores by task and metric. UserError as of `harness.scores_of`."""
        found = {
            name: TASKS[name].score(eval_model, items)
            for name, items in self.items.items()
        }
        if self.others:
            found |= harness.scores_of(
                eval_model,
                self.others,
                self.known,
                limit=self.limit,
                fewshot=self.fewshot,
            )
        return found


def choose(
    names: Sequence[str],
    text: Callable[[int], str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
) -> Tasks:
    """The tasks of these names.

    Args:
      names: of `offline.TASKS`, or of the harness.
      text: of validation, from its beginning, of about so many bytes.
      limit: items of each at most; None: `ITEMS` of the offline ones, all of the
          others.
      fewshot: examples shown, by the harness.

    Raises:
      UserError: a name that is not known, one of the harness's without its package, or
          a text without enough items.
    """
    own = [name for name in names if name in TASKS]
    others = tuple(name for name in names if name not in TASKS)
    known = None
    if others:
        if not harness.is_installed():
            raise UserError(
                f"tasks: {others[0]!r} is not one of {', '.join(TASKS)}, which need"
                " nothing; those of lm-evaluation-harness need its package: pip"
                " install '.[lm-eval]'"
            )
        known = harness.manager()
        harness.check_names(others, known)
    whole = text(BYTES) if own else ""
    items = {name: items_of(name, whole, limit or ITEMS) for name in own}
    return Tasks(items, others, known, limit, fewshot)
