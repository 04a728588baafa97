"""Texts to tokens and back, as the harness does it with other models; and the tasks
made of a text."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from precisions import workload

from trainer.assembly.callbacks import build_tasks
from trainer.data import get_tokenizer
from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.tasks import harness
from trainer.tasks.choose import choose_tasks
from trainer.tasks.eval_model import EvalModel, GenerationRequest, before_first
from trainer.tasks.harness import check_names, request_of, scores_in
from trainer.tasks.offline import TASKS, items_of, write_for_harness
from trainer.tasks.scoring import Answer, Question
from trainer.tasks.writing import LIKELIEST, DecodingParams
from trainer.workload import first_state

SPEC = GPT2Spec(vocab_size=256, context=32, n_layer=1, n_head=2, d_model=32)
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 2000).tolist())


@functools.cache
def eval_model():
    task = workload("fp32", 1, SPEC)
    state = first_state(task, 0)
    return EvalModel(task, get_tokenizer("byte"), 8).at(state.params, state.scaling)


def ids(text):
    return list(text.encode())


def test_a_context_and_its_continuation_in_tokens():
    question = eval_model().question
    assert question("one", " two") == Question(ids("one"), ids(" two"))
    # a space belongs to the word behind it
    assert question("one ", "two") == Question(ids("one"), ids(" two"))
    assert question("", "two") == Question([0], ids("two"))
    # no text begins with the end of a document
    assert question("", "\0two") == Question([0], ids("\ufffdtwo"))
    assert question("  ", "two") == Question([0], ids("  two"))


def test_a_rolling_text_scores_each_token_once_with_as_much_before_it_as_fits():
    text = "".join(chr(97 + i % 26) for i in range(75))
    actual = list(eval_model().windows(text))
    assert [i for window in actual for i in window.continuation] == ids(text)
    assert [
        len(window.context) + len(window.continuation) - 1 for window in actual
    ] == [
        32,
        32,
        32,
    ]
    assert actual[0].context == [0]
    total = sum(answer.logprob for answer in eval_model().answers(actual))
    assert eval_model().rolling(["", text]) == [0, pytest.approx(total)]


def test_a_continuation_that_cannot_be_scored_is_refused_in_a_line():
    for pair, count in ((("one", ""), 0), (("one", "x" * 33), 33)):
        with pytest.raises(
            UserError,
            match=(
                rf"a continuation of {count} tokens cannot be scored; expected 1 to 32"
            ),
        ):
            eval_model().likelihoods([pair])


def test_tasks_that_are_too_long_for_the_context_are_refused_before_the_first_step():
    settings = SimpleNamespace(tasks=["word_order"], limit=2, batch_size=8)
    data = SimpleNamespace(
        first_documents=lambda _: TEXT, tokenizer=get_tokenizer("byte")
    )
    with pytest.raises(UserError, match="cannot be scored; expected 1 to 32"):
        build_tasks(
            SimpleNamespace(eval=settings),
            SimpleNamespace(task=workload("fp32", 1, SPEC), data=data),
        )


def test_texts_end_before_what_ends_them():
    request = GenerationRequest("some context that is longer than what fits", (), 12)
    [whole] = eval_model().texts([request])
    middle = whole[3:5]
    cut, other = eval_model().texts(
        [
            request._replace(until=(middle,)),
            request._replace(context="", max_new_tokens=4),
        ]
    )
    assert cut == whole[: whole.index(middle)]
    assert len(other) <= 4
    with pytest.raises(
        UserError, match="asks for 32 new tokens, the model's context is 32"
    ):
        eval_model().texts([GenerationRequest("one", (), 32)])
    assert before_first("one. two; three", ("; ", ". ")) == "one"
    assert eval_model().decoded(ids("a"), [98, 0, 99]) == "b"


def test_items_are_the_text_s_own_and_always_the_same():
    words, orders = (items_of(name, TEXT, 50) for name in ("last_word", "word_order"))
    assert len(words) == len(orders) == 50
    for item in words:
        assert item.context + item.choices[0] in TEXT
        assert item.choices[0].strip().isalpha()
    golds = set()
    for item in orders:
        assert [item.context + choice in TEXT for choice in item.choices].count(
            True
        ) == 1
        assert item.context + item.choices[item.gold] in TEXT
        assert len(set(item.choices)) == 4
        assert len({"".join(sorted(choice)) for choice in item.choices}) == 1
        golds.add(item.gold)
    assert golds == {0, 1, 2, 3}
    assert items_of("word_order", TEXT, 50) == orders
    with pytest.raises(UserError, match="last_word has 4 items in the validation text"):
        items_of("last_word", TEXT[:800], 50)


def test_who_knows_the_text_scores_full_marks():
    knows = lambda pairs: [
        Answer(0.0 if context + text in TEXT else -1.0, context + text in TEXT)
        for context, text in pairs
    ]
    author = SimpleNamespace(likelihoods=knows)
    tasks = choose_tasks(
        ["last_word", "word_order"], lambda size: TEXT[:size], limit=30
    )
    actual = tasks.scores(author)
    assert actual["last_word"] == {"acc": (1.0, 0.0), "perplexity": (1.0, 0.0)}
    assert actual["word_order"] == {"acc": (1.0, 0.0)}
    nobody = SimpleNamespace(
        likelihoods=lambda pairs: [Answer(-math.log(4), False) for _ in pairs]
    )
    actual = tasks.scores(nobody)
    assert actual["last_word"]["perplexity"].value == pytest.approx(4)
    assert actual["word_order"]["acc"].value < 0.6


def test_the_harness_is_given_the_same_items(tmp_path):
    for name in TASKS:
        items = items_of(name, TEXT, 12)
        tree = yaml.safe_load(write_for_harness(name, items, tmp_path).read_text())
        text = Path(tree["dataset_kwargs"]["data_files"]["test"]).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert [(r["context"], tuple(r["choices"]), r["gold"]) for r in rows] == items
        assert tree["task"] == name
        assert tree["target_delimiter"] == ""


def test_names_that_are_no_tasks_are_refused(monkeypatch):
    monkeypatch.setattr(harness, "is_installed", lambda: False)
    with pytest.raises(
        UserError,
        match=(
            r"'hellaswag' is not one of last_word, word_order.*pip install"
            r" '.\[lm-eval\]'"
        ),
    ):
        choose_tasks(["last_word", "hellaswag"], lambda size: TEXT)
    known = SimpleNamespace(all_tasks=["hellaswag", "piqa"])
    check_names(["piqa"], known)
    with pytest.raises(
        UserError,
        match=(
            "'helaswag' is no task of lm-evaluation-harness; did you mean 'hellaswag'"
        ),
    ):
        check_names(["helaswag"], known)
    with pytest.raises(UserError, match=r"'no.yaml' is no task"):
        check_names(["no.yaml"], known)


def test_what_a_task_asks_of_a_generation():
    assert request_of("a", {"until": "\n", "max_gen_toks": 5}) == GenerationRequest(
        "a", ("\n",), 5
    )
    assert request_of(
        "a", {"until": ["x"], "do_sample": False, "temperature": 0.7}
    ) == GenerationRequest("a", ("x",), 256)
    settings = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_new_tokens": 3,
    }
    assert request_of("a", settings) == GenerationRequest(
        "a", (), 3, DecodingParams(0.7, 0, 0.9)
    )
    assert request_of("a", {}).decoding == LIKELIEST
    with pytest.raises(
        UserError, match="asks for generation with num_beams; known: temperature"
    ):
        request_of("a", {"num_beams": 4})


def test_the_numbers_of_the_harness_s_results():
    row = {
        "alias": "x",
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "exact_match,strict": 0.25,
        "sample_len": 3,
    }
    row |= {"perplexity,none": 7.0, "perplexity_stderr,none": "N/A"}
    actual = scores_in(row)
    assert actual["acc"] == (0.5, 0.1)
    assert actual["exact_match.strict"].value == 0.25
    assert actual["perplexity"].value == 7
    assert math.isnan(actual["perplexity"].error)
    assert len(actual) == 3


@pytest.mark.filterwarnings("default")  # of the package, where it is installed
def test_the_harness_asks_the_examinee(tmp_path):
    pytest.importorskip("lm_eval")
    items = items_of("last_word", TEXT, 12)
    tasks = choose_tasks(
        [str(write_for_harness("last_word", items, tmp_path))], lambda size: TEXT
    )
    [actual] = tasks.scores(eval_model()).values()
    for metric, score in TASKS["last_word"].score(eval_model(), items).items():
        assert actual[metric].value == pytest.approx(score.value)
