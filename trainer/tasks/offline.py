"""Tasks made of a validation text, for which nothing has to be fetched: the last word,
and the order of words.

An item is a passage of the text. `last_word`: which word ends it (as LAMBADA asks it)?
`word_order`: which of four orders of its last words is the author's? Both are a
function of the text alone, so that every model is asked the same, whatever its
tokenizer. `write_for_harness` gives them to lm-evaluation-harness as they are.
"""

import hashlib
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.tasks.eval_model import EvalModel

PASSAGE = 32  # words
TAIL = 8  # of them, whose order is asked for
CHOICES = 4
ITEMS = 200  # by default
BYTES = 1 << 20  # of a text, from whose beginning the items are


class Score(NamedTuple):
    """A metric's value over the items, and its standard error (NaN where there is
    none).
    """

    value: float
    error: float


Scores = dict[str, Score]  # by metric


class Item(NamedTuple):
    """A passage's beginning, and what could follow it; `gold` is the number of what
    does.
    """

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class OfflineTask:
    """A task of this module.

    Attributes:
      items: of a text, without end but that of the text.
      score: of an EvalModel, on items.
      harness: what lm-evaluation-harness is told of it.
    """

    items: Callable[[str], Iterator[Item]]
    score: Callable[[EvalModel, Sequence[Item]], Scores]
    harness: dict[str, Any]


def passages(text: str) -> Iterator[list[re.Match[str]]]:
    """Consecutive passages of about `PASSAGE` words, that end with a word of four
    letters or more.
    """
    words: list[re.Match[str]] = []
    for word in re.finditer(r"\S+", text):
        words.append(word)
        if len(words) >= PASSAGE and re.match(r"[^\W\d_]{4,}", word[0]):
            yield words
            words = []


def last_words(text: str) -> Iterator[Item]:
    """The letters that the last word of each passage begins with, after all that stands
    before them.
    """
    for words in passages(text):
        found = re.match(r"[^\W\d_]{4,}", words[-1][0])
        assert found is not None
        before = text[words[0].start() : words[-2].end()]
        yield Item(before, (text[words[-2].end() : words[-1].start()] + found[0],), 0)


def word_orders(text: str) -> Iterator[Item]:
    """The last words of each passage as they are, and in other orders, drawn by the
    passage itself.

    The very last one is left to `last_words`: where two tasks ask about the same text,
    the harness's `hf` takes the likelihood of one for the other's.
    """
    for *words, _ in passages(text):
        start, end = words[0].start(), words[-TAIL - 1].end()
        tail = [word[0] for word in words[-TAIL:]]
        draw = random.Random(
            hashlib.blake2b(
                text[start : words[-1].end()].encode(), digest_size=8
            ).digest()
        )
        others: set[str] = set()
        for _ in range(10 * CHOICES):
            shuffled = " ".join(draw.sample(tail, TAIL))
            if shuffled != " ".join(tail) and len(others) < CHOICES - 1:
                others.add(shuffled)
        if len(others) < CHOICES - 1:
            continue  # the same word again and again
        gold = draw.randrange(CHOICES)
        choices = sorted(others)
        choices.insert(gold, " ".join(tail))
        yield Item(text[start:end], tuple(f" {choice}" for choice in choices), gold)


def score_words(eval_model: EvalModel, items: Sequence[Item]) -> Scores:
    """Perplexity of the last word, and the share of items where its tokens are the
    likeliest.
    """
    answers = eval_model.likelihoods(
        [(item.context, item.choices[0]) for item in items]
    )
    nats = mean_of([-answer.logprob for answer in answers])
    perplexity = math.exp(min(nats.value, 700.0))
    return {
        "acc": mean_of([float(answer.greedy) for answer in answers]),
        "perplexity": Score(perplexity, perplexity * nats.error),
    }


def score_orders(eval_model: EvalModel, items: Sequence[Item]) -> Scores:
    """The share of items whose own order is the likeliest; all have the same
    characters.
    """
    answers = iter(
        eval_model.likelihoods(
            [(item.context, choice) for item in items for choice in item.choices]
        )
    )
    right = []
    for item in items:
        found = [next(answers).logprob for _ in item.choices]
        right.append(float(found.index(max(found)) == item.gold))
    return {"acc": mean_of(right)}


def mean_of(values: Sequence[float]) -> Score:
    """The mean of items and its standard error."""
    error = (
        statistics.stdev(values) / math.sqrt(len(values))
        if len(values) > 1
        else math.nan
    )
    return Score(math.fsum(values) / len(values), error)


def metric(name: str, aggregation: str, *, higher: bool) -> dict[str, Any]:
    """An entry of the harness's `metric_list`."""
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher}


ACCURACY = metric("acc", "mean", higher=True)
TASKS = {
    "last_word": OfflineTask(
        last_words,
        score_words,
        {
            "output_type": "loglikelihood",
            "doc_to_target": "{{choices[0]}}",
            "metric_list": [metric("perplexity", "perplexity", higher=False), ACCURACY],
        },
    ),
    "word_order": OfflineTask(
        word_orders,
        score_orders,
        {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [ACCURACY],
        },
    ),
}


def items_of(name: str, text: str, limit: int) -> list[Item]:
    """The first `limit` items of a task. UserError for a text with less than ten."""
    found = [
        item for item, _ in zip(TASKS[name].items(text), range(limit), strict=False)
    ]
    if len(found) < min(10, limit):
        raise UserError(
            f"tasks: {name} has {len(found)} items in the validation text, a passage of"
            f" {PASSAGE} words each; expected 10 or more: use more text, or another"
            " task"
        )
    return found


def write_for_harness(name: str, items: Sequence[Item], directory: Path) -> Path:
    """Write a task as lm-evaluation-harness reads it
    (`--include_path directory --tasks name`); its YAML file.
    """
    import yaml

    directory.mkdir(parents=True, exist_ok=True)
    rows = directory.resolve() / f"{name}.jsonl"
    lines = (json.dumps(item._asdict(), ensure_ascii=False) for item in items)
    write_atomically(rows, "".join(f"{line}\n" for line in lines))
    tree = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
        **TASKS[name].harness,
        "metadata": {"version": 1.0},
    }
    path = directory / f"{name}.yaml"
    write_atomically(path, yaml.safe_dump(tree, sort_keys=False))
    return path
