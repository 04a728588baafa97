"""The tasks of lm-evaluation-harness (package `lm-eval`, extra `lm-eval`), asked of an
`EvalModel`.

What a task asks, how many examples it shows and how it scores is the harness's own; how
texts become tokens, in what precision and in which batches they go through the model is
ours.
"""

import difflib
import functools
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.tasks.eval_model import EvalModel, GenerationRequest
from trainer.tasks.offline import TASKS, Score, Scores
from trainer.tasks.writing import DecodingParams

PACKAGE = "lm_eval"
MOST_NEW = 256  # tokens, where a task does not say it: the harness's own default
# What a task may say of a generation; beside these the harness's `until` and its names
# of the number of tokens.
MANNER = ("temperature", "top_k", "top_p")
MAX_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def is_installed() -> bool:
    """Return whether the package is there."""
    return importlib.util.find_spec(PACKAGE) is not None


@functools.cache
def manager() -> Any:
    """The harness's list of tasks, which takes some seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def check_names(names: Sequence[str], known: Any) -> None:
    """Raise UserError for a name that is neither a task, group or tag of the harness,
    nor a file that describes one.
    """
    for name in names:
        if name not in known.all_tasks and not (
            name.endswith(".yaml") and Path(name).is_file()
        ):
            close = difflib.get_close_matches(name, [*TASKS, *known.all_tasks], n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(
                f"tasks: {name!r} is no task of lm-evaluation-harness; {hint}Valid:"
                f" {', '.join(TASKS)}, what `lm-eval ls tasks` lists, or the .yaml file"
                " of a task"
            )


def scores_of(
    eval_model: EvalModel,
    names: Sequence[str],
    known: Any,
    *,
    limit: int | None,
    fewshot: int | None,
) -> dict[str, Scores]:
    """The scores of tasks, each of a group alone too, by name and metric.

    Args:
      eval_model: has parameters.
      names: which `check_names` has not refused.
      known: of `manager`.
      limit: examples of each task at most; None: all.
      fewshot: examples that are shown before each; None: as many as the task says.

    Raises:
      UserError: a task whose data cannot be had, or that asks for what the model
          cannot.
    """
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(
            adapter(eval_model),
            tasks=list(names),
            num_fewshot=fewshot,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=known,
        )
    except OSError as error:  # what is downloaded
        raise UserError(
            f"tasks={','.join(names)}: {str(error).splitlines()[0]}"
        ) from error
    assert found is not None
    return {name: scores_in(row) for name, row in found["results"].items()}


def scores_in(row: dict[str, Any]) -> Scores:
    """The numbers of a task's row of results; a filter that is not the usual one stays
    in the metric's name.
    """
    scores: Scores = {}
    for key, value in row.items():
        metric, _, how = key.partition(",")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not how
            or metric.endswith("_stderr")
        ):
            continue
        error = row.get(f"{metric}_stderr,{how}")
        name = metric if how == "none" else f"{metric}.{how}"
        scores[name] = Score(
            float(value), float(error) if isinstance(error, int | float) else math.nan
        )
    return scores


def request_of(context: str, told: dict[str, Any]) -> GenerationRequest:
    """What a task wants to have written. UserError for a way to choose tokens that is
    not known here.
    """
    rest = dict(told)
    until = rest.pop("until", None) or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    given = [rest.pop(name) for name in MAX_NEW if rest.get(name) is not None]
    sampled = rest.pop("do_sample", None)
    settings = {name: rest.pop(name) for name in MANNER if rest.get(name) is not None}
    unknown = [
        name
        for name, value in rest.items()
        if value is not None and name not in MAX_NEW
    ]
    if unknown:
        raise UserError(
            f"a task asks for generation with {unknown[0]}; known: {', '.join(MANNER)},"
            f" until, {MAX_NEW[0]}"
        )
    temperature = float(settings.get("temperature", 1.0 if sampled else 0.0))
    if sampled is False or temperature == 0:
        return GenerationRequest(context, until, int(given[0]) if given else MOST_NEW)
    decoding = DecodingParams(
        temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0))
    )
    return GenerationRequest(
        context, until, int(given[0]) if given else MOST_NEW, decoding
    )


def adapter(eval_model: EvalModel) -> Any:
    """The harness's model that asks the model."""
    from lm_eval.api.model import LM

    class Adapter(LM):  # of a package that need not be there when this module is read
        tokenizer_name = eval_model.tokenizer.fingerprint

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [
                (answer.logprob, answer.greedy)
                for answer in eval_model.likelihoods(
                    [request.args for request in requests]
                )
            ]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return eval_model.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return eval_model.texts([request_of(*request.args) for request in requests])

    return Adapter()
