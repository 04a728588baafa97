"""Check the Dockerfile where there is no Docker: its rules and files, and on demand its
RUN lines.

Without `build=yes` it only reads. With it, the RUN lines are executed in order in an
empty directory that stands for the image's root: what is copied is copied there, and
the image's paths lead there. A RUN that calls a package manager or names a system
directory is reported as untested. At the end the entry point trains two steps. That
installs what the image installs, some gigabytes from the package index, and needs
neither a daemon nor root.
"""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.arguments import argument, note, run
from trainer.errors import UserError

KNOWN = (
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "ENTRYPOINT",
    "CMD",
    "ENV",
    "ARG",
    "LABEL",
    "EXPOSE",
    "USER",
    "VOLUME",
)
SYSTEM = (
    "bin",
    "boot",
    "dev",
    "etc",
    "home",
    "lib",
    "lib64",
    "opt",
    "proc",
    "root",
    "sbin",
    "sys",
    "tmp",
    "usr",
    "var",
)
PACKAGE_MANAGERS = re.compile(r"\b(apt-get|apt|dpkg|dnf|yum|apk)\b")
# where an absolute path begins; its first folder
IMAGE_PATH = re.compile(r"(?<![\w./$}:-])/(\w[\w.-]*)")
# how the package index is reached
PASSED_ON = re.compile(r"(?i)(pip_|uv_|ssl_|https?_proxy|no_proxy|requests_ca)")
TINY = (
    "model.n_layer=1",
    "model.n_head=2",
    "model.d_model=32",
    "model.context=32",
    "train.batch_tokens=64",
)
TWO_STEPS = (
    *TINY,
    "train.steps=2",
    "train.final_eval_batches=1",
    "sample.max_new_tokens=0",
    "tracker=jsonl",
    "run_dir=runs/two",
)


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    file: str = argument(
        "the Dockerfile; its folder is the build's context", "Dockerfile"
    )
    build: str = argument("yes: execute its RUN lines too", "no")
    root: str = argument(
        "the empty directory that stands for the image's root; empty: a temporary one",
        "",
    )


class Instruction(NamedTuple):
    """An instruction of a Dockerfile: the line it begins in, its name, and what follows
    it, continued lines joined.
    """

    line: int
    name: str
    rest: str


def main(args: Arguments) -> None:
    """Raise UserError for what is wrong, all of it at once; say what was tested and
    what was not.
    """
    path = Path(args.file).resolve()
    if args.build not in ("yes", "no"):
        raise UserError(f"build={args.build}: expected yes or no")
    try:
        steps = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read file={args.file}: {error.strerror}") from error
    if wrong := [*complaints(steps, path.parent)]:
        raise UserError(f"{args.file}, " + "; ".join(wrong))
    print(
        f"{args.file}: {len(steps)} instructions follow the rules, and what they copy"
        " is there"
    )
    if args.build == "no":
        return
    if args.root:
        build(steps, path.parent, Path(args.root).resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="image-") as folder:
            build(steps, path.parent, Path(folder))


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile. UserError names the line of one that is unknown
    here.
    """
    found: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        # a comment may stand between continued lines
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if line.rstrip().endswith("\\"):
            continue
        name, _, rest = " ".join(parts).partition(" ")
        if name.upper() not in KNOWN or "<<" in rest:
            raise UserError(
                f"line {start}: {name} {rest[:40]}: not known here; expected one of"
                f" {', '.join(KNOWN)}"
            )
        found.append(Instruction(start, name.upper(), rest.strip()))
        parts = []
    return found


def complaints(steps: Sequence[Instruction], context: Path) -> Iterator[str]:
    """What breaks a rule, with its line."""
    if not steps or steps[0].name not in ("FROM", "ARG"):
        yield "line 1: expected FROM first"
    for step in steps:
        yield from (f"line {step.line}: {text}" for text in wrong_in(step, context))
    entries = [step for step in steps if step.name == "ENTRYPOINT"]
    if len(entries) != 1:
        yield f"{len(entries)} ENTRYPOINTs; expected one"


def wrong_in(step: Instruction, context: Path) -> Iterator[str]:
    """What is wrong in one instruction."""
    match step.name:
        case "FROM":
            if (
                not re.search(r":[\w.-]+|@sha256:\w+", step.rest)
                or ":latest" in step.rest
            ):
                yield (
                    f"{step.rest}: expected a tag other than latest, which makes builds"
                    " repeat"
                )
        case "RUN":
            yield from wrong_in_run(step.rest)
        case "WORKDIR":
            if not step.rest.startswith("/"):
                yield f"WORKDIR {step.rest}: expected an absolute path"
        case "COPY":
            yield from wrong_in_copy(step.rest, context)
        case "ENTRYPOINT" | "CMD":
            if words_of(step) is None:
                yield (
                    f"{step.name} {step.rest}: expected a list in JSON: a shell in"
                    " between would not pass signals on"
                )


def wrong_in_run(command: str) -> Iterator[str]:
    """What is wrong in a shell command."""
    checked = subprocess.run(
        ["sh", "-n"], input=command, capture_output=True, text=True
    )
    if checked.returncode:
        yield f"not a shell command: {checked.stderr.strip()}"
    if "apt-get install" in command:
        wanted = (
            "apt-get update",
            "--yes",
            "--no-install-recommends",
            "rm -rf /var/lib/apt/lists/*",
        )
        yield from (
            f"apt-get install without {part} in the same RUN"
            for part in wanted
            if part not in command
        )
    for tool, flag in (
        (r"(?<!uv )\bpip install", "--no-cache-dir"),
        (r"\buv pip install", "--no-cache"),
    ):
        if re.search(tool, command) and flag not in command:
            yield f"pip install without {flag} leaves its cache in the image"


def wrong_in_copy(rest: str, context: Path) -> Iterator[str]:
    """What is wrong in a COPY."""
    *sources, target = rest.split()
    if rest.startswith("--"):
        yield f"COPY {rest}: options are not known here"
        return
    if len(sources) > 1 and not target.endswith("/"):
        yield f"COPY {rest}: several sources need a target that ends in /"
    hidden = ignored_patterns(context)
    for source in sources:
        if not (context / source).exists():
            yield f"COPY {source}: it is not there"
        elif is_ignored(source, hidden):
            yield f"COPY {source}: .dockerignore leaves it out"


def ignored_patterns(context: Path) -> list[str]:
    """The patterns of the context's .dockerignore."""
    path = context / ".dockerignore"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [
        line.strip().strip("/")
        for line in lines
        if line.strip() and not line.startswith("#")
    ]


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a path in the context, or a folder that it is in, is left out."""
    parts = Path(name).parts
    paths = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    anywhere = [
        pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")
    ]
    by_path = any(
        fnmatch.fnmatch(path, pattern) for path in paths for pattern in patterns
    )
    return by_path or any(
        fnmatch.fnmatch(part, pattern) for part in parts for pattern in anywhere
    )


def words_of(step: Instruction) -> list[str] | None:
    """The words of an ENTRYPOINT or CMD in JSON; None: it is none."""
    try:
        words = json.loads(step.rest)
    except ValueError:
        return None
    return (
        words
        if isinstance(words, list) and all(isinstance(word, str) for word in words)
        else None
    )


def build(steps: Sequence[Instruction], context: Path, root: Path) -> None:
    """Follow the instructions in `root`, which is empty, then train two steps.
    UserError names what failed.
    """
    if root.exists() and any(root.iterdir()):
        raise UserError(f"root={root} is not empty; choose another")
    work, environment = root, environment_of(root)
    untested: list[str] = []
    for step in steps:
        match step.name:
            case "WORKDIR":
                work = inside(root, step.rest)
                work.mkdir(parents=True, exist_ok=True)
            case "COPY":
                copy(step.rest, context, root, work)
            case "RUN" if reason := cannot_run(step.rest):
                untested.append(f"line {step.line}, RUN {step.rest[:60]}...: {reason}")
            case "RUN":
                note(f"line {step.line}, RUN {step.rest}")
                execute(
                    ["sh", "-c", moved(step.rest, root)],
                    work,
                    environment,
                    f"line {step.line}",
                )
            case "ENTRYPOINT":
                entry = [moved(word, root) for word in words_of(step) or ()]
            case _:
                untested.append(f"line {step.line}, {step.name} {step.rest}")
    for arguments in (["--cfg", "job"], TWO_STEPS):
        note(f"ENTRYPOINT {' '.join(arguments)}")
        execute([*entry, *arguments], work, environment, "ENTRYPOINT")
    print(
        "its RUN lines and its ENTRYPOINT worked in an empty directory, but these were"
        " not tested:"
    )
    print(
        "\n".join(
            f"  {text}"
            for text in [*untested, "CUDA, the driver of the host and its GPUs"]
        )
    )


def environment_of(root: Path) -> dict[str, str]:
    """An empty environment whose `python3` is this Python without its packages, and
    whose home is in `root`.
    """
    tools, home = root / ".host" / "bin", root / ".host" / "home"
    tools.mkdir(parents=True)
    home.mkdir()
    (tools / "python3").symlink_to(os.path.realpath(sys.executable))
    passed = {
        name: value for name, value in os.environ.items() if PASSED_ON.match(name)
    }
    return passed | {
        "PATH": f"{tools}:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
    }


def inside(root: Path, path: str, work: Path | None = None) -> Path:
    """Where a path of the image is; a relative one is in `work`."""
    return root / path.lstrip("/") if path.startswith("/") else (work or root) / path


def moved(command: str, root: Path) -> str:
    """The command with the image's absolute paths in `root`."""
    return IMAGE_PATH.sub(lambda found: f"{root}/{found[1]}", command)


def cannot_run(command: str) -> str:
    """Why a RUN is not executed outside of its image; empty: it is."""
    if found := PACKAGE_MANAGERS.search(command):
        return f"{found[0]} needs the image's system"
    if system := [name for name in IMAGE_PATH.findall(command) if name in SYSTEM]:
        return f"/{system[0]} is the host's here"
    return ""


def copy(rest: str, context: Path, root: Path, work: Path) -> None:
    """Copy from the context what .dockerignore does not leave out: files into a folder,
    of a folder what is in it.
    """
    *sources, target = rest.split()
    hidden = ignored_patterns(context)

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [
            n
            for n in names
            if is_ignored(str((Path(folder) / n).relative_to(context)), hidden)
        ]

    for source in sources:
        place = inside(root, target, work)
        if (context / source).is_dir():
            shutil.copytree(
                context / source, place, ignore=left_out, dirs_exist_ok=True
            )
        else:
            place = place / Path(source).name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(context / source, place)


def execute(
    command: Sequence[str], work: Path, environment: dict[str, str], name: str
) -> None:
    """Run it. UserError has the end of what it said, if it failed."""
    done = subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise UserError(
            f"{name} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}"
        )


if __name__ == "__main__":
    sys.exit(run(Arguments, "check_dockerfile", __doc__ or "", main))
