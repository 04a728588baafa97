"""Tasks of lm-evaluation-harness (package and extra `lm-eval`) for an `EvalModel`.

The harness decides the questions, the examples and the metrics. Tokenization, precision
and batches are ours.
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
MOST_NEW = 256  # new tokens, where a task has no limit: the harness's own default
# The generation settings that a task may have, beside `until` and the names of the
# token limit.
DECODING = ("temperature", "top_k", "top_p")
MAX_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def is_installed() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


@functools.cache
def manager() -> Any:
    """Return the harness's task list, which takes some seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def check_names(names: Sequence[str], known: Any) -> None:
    """Raise UserError for an unknown task.

    Known are tasks, groups and tags of the harness, and YAML files of tasks.
    """
    for name in names:
        is_file = name.endswith(".yaml") and Path(name).is_file()
        if name not in known.all_tasks and not is_file:
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
    """Return the scores of tasks, and of each task of a group, by name and metric.

    Args:
      eval_model: has parameters.
      names: names that passed `check_names`.
      known: the result of `manager`.
      limit: examples of each task at most; None: all.
      fewshot: examples that are shown before each; None: as many as the task says.

    Raises:
      UserError: data that cannot be downloaded, or a request that the model cannot
          answer.
    """
    from lm_eval import simple_evaluate

    try:
        results = simple_evaluate(
            adapter(eval_model),
            tasks=list(names),
            num_fewshot=fewshot,
            limit=limit,
            # By default, errors of F1, perplexities and medians take 100,000 resamples.
            # With 0 the harness computes no errors at all, not those of means either.
            bootstrap_iters=0,
            # The samples of all tasks would be kept in memory, and nobody reads them
            # here.
            log_samples=False,
            task_manager=known,
        )
    except OSError as error:  # a failed download
        raise UserError(
            f"tasks={','.join(names)}: {str(error).splitlines()[0]}"
        ) from error
    assert results is not None
    return {name: scores_in(row) for name, row in results["results"].items()}


def scores_in(row: dict[str, Any]) -> Scores:
    """Return the metrics of a task's row of results.

    A filter other than the harness's default is part of the metric's name.
    """
    scores: Scores = {}
    for key, value in row.items():
        # A key is METRIC,FILTER; others, such as alias, describe the task.
        metric, _, how = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not how or metric.endswith("_stderr"):
            continue
        # "N/A", a text, where the harness computes none.
        error = row.get(f"{metric}_stderr,{how}")
        name = metric if how == "none" else f"{metric}.{how}"
        scores[name] = Score(
            float(value), float(error) if isinstance(error, int | float) else math.nan
        )
    return scores


def request_of(context: str, settings: dict[str, Any]) -> GenerationRequest:
    """Return a task's request; UserError for an unknown generation setting."""
    rest = {name: value for name, value in settings.items() if value is not None}
    until = rest.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    limits = [int(rest.pop(name)) for name in MAX_NEW if name in rest]
    max_new_tokens = limits[0] if limits else MOST_NEW
    do_sample = rest.pop("do_sample", None)
    # transformers samples at 1 by default.
    temperature = float(rest.pop("temperature", 1.0 if do_sample else 0.0))
    top_k, top_p = int(rest.pop("top_k", 0)), float(rest.pop("top_p", 1.0))
    # A setting that is left out would give another score than the harness's.
    if rest:
        raise UserError(
            f"a task asks for generation with {next(iter(rest))}; known:"
            f" {', '.join(DECODING)}, until, {MAX_NEW[0]}"
        )
    if do_sample is False or temperature == 0:
        return GenerationRequest(context, until, max_new_tokens)
    decoding = DecodingParams(temperature, top_k, top_p)
    return GenerationRequest(context, until, max_new_tokens, decoding)


def adapter(eval_model: EvalModel) -> Any:
    """Return the harness's interface to a model."""
    from lm_eval.api.model import LM

    class Adapter(LM):  # defined here, since the package is optional
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
