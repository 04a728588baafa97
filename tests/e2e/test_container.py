"""The Dockerfile, as far as it can be checked without building it: `make docker-check`
executes it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_dockerfile as check
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
STEPS = check.parse((ROOT / "Dockerfile").read_text())


def write(folder, text, **files):
    """A context with a Dockerfile and files; the entry point runs `app.py` with this
    Python's standard library."""
    (folder / "Dockerfile").write_text(text)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return check.Arguments(file=str(folder / "Dockerfile"))


def complaints(folder, text):
    write(folder, text, there="")
    return [*check.complaints(check.parse(text), folder)]


def test_the_dockerfile_follows_the_rules_and_what_it_copies_is_there(capsys):
    check.main(check.Arguments(file=str(ROOT / "Dockerfile")))
    assert "instructions follow the rules" in capsys.readouterr().out


def test_what_is_copied_is_enough_to_start_the_trainer(tmp_path):
    for step in STEPS:
        if step.name == "COPY":
            check.copy(step.rest, ROOT, tmp_path, tmp_path)
    assert not [*tmp_path.rglob("__pycache__")]
    (entry,) = [check.words_of(step) for step in STEPS if step.name == "ENTRYPOINT"]
    done = subprocess.run(
        [sys.executable, *entry[1:], "--cfg", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpt2_nano" in done.stdout


def test_it_installs_what_pyproject_and_the_lock_say():
    (install,) = [
        step.rest
        for step in STEPS
        if step.name == "RUN" and "uv pip install" in step.rest
    ]
    assert "--constraint requirements.lock -r pyproject.toml --extra gpu" in install


def test_continued_lines_are_joined_and_comments_between_them_left_out():
    steps = check.parse("# first\nFROM a:1\nRUN x \\\n  # why\n  && y\n\nCOPY a b/\n")
    assert [tuple(step) for step in steps] == [
        (2, "FROM", "a:1"),
        (3, "RUN", "x && y"),
        (7, "COPY", "a b/"),
    ]
    with pytest.raises(UserError, match="line 1: ADD a b"):
        check.parse("ADD a b")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("FROM ubuntu", "a tag other than latest"),
        ("FROM ubuntu:latest", "a tag other than latest"),
        ("WORKDIR app", "an absolute path"),
        ("COPY gone /a/", "it is not there"),
        ("COPY there there /a", "needs? a target that ends in /"),
        ("RUN echo '", "not a shell command"),
        ("RUN apt-get update && apt-get install --yes git", "--no-install-recommends"),
        ("RUN pip install x", "pip install without --no-cache-dir"),
        ("RUN uv pip install x", "pip install without --no-cache "),
        ("ENTRYPOINT python -m trainer", "a list in JSON"),
    ],
)
def test_what_breaks_a_rule_is_named_with_its_line(tmp_path, line, complaint):
    sound = "FROM a:1\nWORKDIR /app\nCOPY there /a/\nRUN true\n"
    entry = "" if line.startswith("ENTRYPOINT") else 'ENTRYPOINT ["x"]\n'
    assert complaints(tmp_path, sound + 'ENTRYPOINT ["x"]') == []
    found, *_ = complaints(tmp_path, sound + entry + line)
    assert found.startswith(f"line {6 if entry else 5}: ")
    assert re.search(complaint, found)


def test_what_dockerignore_leaves_out_cannot_be_copied(tmp_path):
    write(
        tmp_path,
        "",
        _dot_dockerignore="runs\n**/cache\n",
        runs__a="",
        kept__cache__b="",
        kept__c="",
    )
    patterns = check.ignored_patterns(tmp_path)
    assert check.is_ignored("runs/a", patterns)
    assert check.is_ignored("kept/cache/b", patterns)
    assert not check.is_ignored("kept/c", patterns)
    assert [*check.wrong_in_copy("runs /app/", tmp_path)] == [
        "COPY runs: .dockerignore leaves it out"
    ]
    check.copy("kept /app/kept", tmp_path, tmp_path / "root", tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").rglob("*")] == [
        "app",
        "kept",
        "c",
    ]


def test_run_lines_are_executed_in_an_empty_root_and_those_of_the_system_are_not(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # which the image does not have
    context = tmp_path / "context"
    context.mkdir()
    text = (
        "FROM a:1\nRUN apt-get update\nRUN echo x > /etc/never\nWORKDIR /app\nCOPY"
        ' app.py ./\nRUN mkdir /made && echo found > /made/file\nENTRYPOINT ["python3",'
        ' "/app/app.py"]\n'
    )
    app = (
        "import os, sys; assert 'PYTHONPATH' not in os.environ; open('told',"
        " 'a').write(str(sys.argv[1:]))"
    )
    arguments = write(context, text, app_dot_py=app)
    root = tmp_path / "root"
    check.main(check.Arguments(file=arguments.file, build="yes", root=str(root)))
    assert (root / "made" / "file").read_text() == "found\n"
    assert "--cfg" in (root / "app" / "told").read_text()
    said = capsys.readouterr().out
    assert "line 2, RUN apt-get update...: apt-get needs the image's system" in said
    assert "line 3, RUN echo x > /etc/never...: /etc is the host's here" in said
    with pytest.raises(UserError, match="is not empty"):
        check.main(check.Arguments(file=arguments.file, build="yes", root=str(root)))


def test_a_run_line_that_fails_ends_the_check_with_what_it_said(tmp_path):
    arguments = write(
        tmp_path, 'FROM a:1\nRUN echo how && exit 7\nENTRYPOINT ["true"]\n'
    )
    with pytest.raises(UserError, match=r"line 2 ended with exit code 7:\nhow"):
        check.main(check.Arguments(file=arguments.file, build="yes"))
