"""The adaptation study: its text, each figure by hand on made-up runs, and a short
study of real ones."""

import dataclasses
import json
import math

import pytest

from scripts.studies import adaptation, catalogues, runs
from scripts.studies.adaptation import OLD, Arguments, Curve, Sizes
from scripts.studies.adaptation_table import RANDOM
from scripts.studies.runs import Trial
from trainer.cli import train_tokenizer
from trainer.config.composition import compose_config
from trainer.errors import UserError

CATALOGUE = r"""
# somebody, 2026
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"

#: a.py:1
msgid "Yes"
msgstr "Ja"

#, fuzzy
msgid "No"
msgstr "Vielleicht"

msgid ""
"A long "
"one"
msgstr ""
"Ein \"langes\"\n"
"Wort"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

msgid "untranslated"
msgstr ""

#~ msgid "old"
#~ msgstr "alt"
"""


def test_texts_are_documents_of_different_messages(tmp_path, monkeypatch):
    def fetch(packages, folder):
        assert packages == ["one==1", "two"]
        for package in ("b", "a"):
            path = folder / package / "locale/de/LC_MESSAGES/x.po"
            path.parent.mkdir(parents=True)
            path.write_text(
                CATALOGUE + f'\nmsgid "x"\nmsgstr "{package}"\n', encoding="utf-8"
            )

    monkeypatch.setattr(catalogues, "fetch", fetch)
    monkeypatch.setattr(catalogues, "ROWS", 4)
    catalogues.write_texts(tmp_path / "out/t.jsonl", ["one==1", "two"], "de")
    rows = [
        json.loads(line)["text"]
        for line in (tmp_path / "out/t.jsonl").read_text("utf-8").splitlines()
    ]
    assert rows == ['Ja\nEin "langes"\nWort\n%d Datei\n%d Dateien\n', "a\nb\n"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["t.jsonl"]
    with pytest.raises(
        UserError, match="language=xx: one==1, two have no catalogue of it"
    ):
        catalogues.write_texts(tmp_path / "out/u.jsonl", ["one==1", "two"], "xx")


def test_figures_are_of_pairs_of_one_seed_and_rate():
    curves = {
        Trial(1e-3, "focus", 1): Curve({10: 2.0, 20: 1.5}),
        Trial(1e-3, "focus", 2): Curve({10: 3.0, 20: 1.0}),
        Trial(1e-3, RANDOM, 1): Curve({10: 3.0, 20: 2.0}),
        Trial(1e-3, RANDOM, 2): Curve({10: 3.0, 20: 2.0}),
        Trial(1e-3, OLD, 2): Curve({20: 3.0, 40: 2.5}),
        Trial(3e-3, "focus", 1): Curve({10: 2.5, 20: 1.5}),
        Trial(3e-3, RANDOM, 1): Curve({10: 2.75, 20: 2.5}),
    }
    focus, random, old, fast, fast_random = adaptation.table(curves)
    assert (focus.seeds, random.seeds, old.seeds, old.steps) == (2, 2, 1, 40)
    assert focus.difference[0] == -0.75
    # at 2.0 after 10, and after 15 of 20 steps
    assert focus.reached[0] == pytest.approx((0.5 + 0.75) / 2)
    assert focus.best == focus.reached
    assert old.difference == (0.5, math.inf)
    assert old.reached[0] == math.inf
    assert (fast.lr, fast.difference[0], fast.reached[0]) == (3e-3, -1.0, 0.5)
    # the best rate of random rows is the lower one
    assert (fast.best[0], fast_random.best[0]) == (0.75, math.inf)
    sooner = adaptation.shorter(curves)
    assert sooner == {
        1e-3: {10: (1.0, 0.0), 20: focus.reached},
        3e-3: {10: (1.0, math.inf), 20: (0.5, math.inf)},
    }
    text = adaptation.markdown(
        "A model.", Sizes(1000, 500, 250), [focus, random, old, fast], sooner
    )
    assert (
        "At 0.001 FOCUS is where random rows end, had both so many steps, after: 10:"
        " 1.00 ± 0.00; 20: 0.62" in text
    )
    assert "0.500 with the old tokenizer, 0.250 with the new one" in text
    assert (
        "| 0.001 | new, random rows | 2 | 20 | 2.0000 ± 0.0000 | - | - | 1.00 ± 0.00 |"
        in text
    )
    assert "| 0.001 | old | 1 | 40 | 2.5000 | +0.5000 | never | never |" in text
    assert "| 0.003 | new, FOCUS | 1 | 20 | 1.5000 | -1.0000 | 0.50 | 0.75 |" in text


def test_a_study_is_continued_where_it_was_and_its_commands_are_the_trainers(
    tmp_path, monkeypatch, capsys
):
    old, new, out = tmp_path / "old.txt", tmp_path / "new.txt", tmp_path / "study"
    old.write_text("the cat sat on the mat and slept. " * 400)
    new.write_text("Der Hund saß auf der Matte und schlief. " * 400, encoding="utf-8")
    requests = []

    def make_tokenizer(args, name, *source):
        if not (out / "tokenizers" / name).exists():
            text = new if name == "new" else old
            words = [
                "vocab_size=280",
                f"out={out / 'tokenizers' / name}",
                f"data.cache_dir={out / 'data'}",
                "all_text=yes",
            ]
            paths = ["data=text", f"data.paths=[{text}]"]
            assert train_tokenizer.command([*paths, *words]) == 0

    def in_turn(commands, folders, count, *_):
        for job, command in commands.items():
            assert command[1:3] == ["-m", "trainer"]
            requests.append((job.item, job.seed))
            c = compose_config(
                [word for word in command[3:] if word != "model=from_init"]
            )
            steps = range(
                c.train.eval_every or c.train.steps,
                c.train.steps + 1,
                c.train.eval_every or c.train.steps,
            )
            rows = [
                {"step": step, "val/bits_per_byte": 4 / step + (job.item == RANDOM)}
                for step in steps
            ]
            (folders[job] / "checkpoints" / str(c.train.steps)).mkdir(parents=True)
            (folders[job] / "metrics.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
            yield job

    monkeypatch.setattr(adaptation, "make_tokenizer", make_tokenizer)
    monkeypatch.setattr(runs, "in_turn", in_turn)
    args = Arguments(
        text=str(new),
        vocab_size=280,
        base_steps=4,
        steps=4,
        evaluations=2,
        seeds=1,
        lr="0.01",
        out=str(out),
    )
    adaptation.main(args)
    assert requests == [("base", 0), ("focus", 1), ("random", 1), ("old", 1)]
    actual = json.loads((out / "adaptation.json").read_text())
    assert [row["arm"] for row in actual["table"]] == ["focus", "random", "old"]
    assert actual["text"]["old_tokens"] > actual["text"]["new_tokens"]
    assert [row["steps"] for row in actual["table"]][2] > 4
    assert actual["table"][0]["difference"] == [-1.0, None]
    assert [path.parent.name for path in out.glob("**/checkpoints")] == ["base"]
    adaptation.main(dataclasses.replace(args, seeds=2))
    assert requests[4:] == [("focus", 2), ("random", 2), ("old", 2)]
    assert "3 of 6 runs are finished; 3 to go" in capsys.readouterr().out
    requests.clear()
    adaptation.main(dataclasses.replace(args, lr="0.01,0.02"))
    # at the rate that was added
    assert requests == [("focus", 1), ("random", 1), ("old", 1)]
    assert [
        row["lr"] for row in json.loads((out / "adaptation.json").read_text())["table"]
    ] == [0.01] * 3 + [0.02] * 3
