"""What the supervisor of far machines refuses before anything starts, and its examples
in the documents."""

import itertools
import shlex

import pytest
from command import ROOT

from scripts.far import Arguments, planned
from trainer.cli.arguments import read
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parallel=diloco", "found diloco.replicas=4, diloco.quorum=None"),
        (
            "parallel=diloco diloco.replicas=2 diloco.quorum=2",
            "found diloco.replicas=2",
        ),
        (
            "parallel=diloco diloco.quorum=3 train.batch_tokens=2048",
            "split over diloco.replicas=3 replicas",
        ),
        ("parallel=diloco diloco.quorum=5", "less than diloco.quorum=5"),
    ],
)
def test_what_could_not_go_on_with_fewer_is_refused_before_anything_starts(
    tmp_path, words, message
):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        planned(
            Arguments(
                member="a", members=4, trainer=f"run_dir={tmp_path / 'A'} {words}"
            )
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"member": ""}, "member=: expected a name"),
        ({"members": 0}, "members=0: expected"),
        ({"trainer": "parallel=diloco diloco.quorum=1"}, "trainer= names no run_dir"),
        (
            {"gone_seconds": -1, "failures": 0},
            "gone_seconds=-1, failures=0: expected numbers above zero",
        ),
    ],
)
def test_numbers_and_names_that_nobody_has_are_refused_in_a_line(given, message):
    words = {"member": "a", "members": 2, "trainer": "parallel=diloco diloco.quorum=1"}
    with pytest.raises(UserError, match=message):
        planned(Arguments(**words | given))


def test_the_examples_of_the_documents_could_go_on_with_fewer():
    entries = []
    for document in (ROOT / "README.md", ROOT / "docs" / "parallel.md"):
        for line in document.read_text().replace("\\\n", " ").splitlines():
            if "python -m scripts.far" in line:
                words = shlex.split(
                    line.partition("scripts.far")[2].replace("$m", "a"), comments=True
                )
                words = list(itertools.takewhile(lambda word: "=" in word, words))
                entries.append(planned(read(Arguments, words)))
    assert len(entries) >= 2
    assert all(plan.fewest < 4 for plan in entries)
