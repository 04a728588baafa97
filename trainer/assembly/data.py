"""From the configuration of data to loaders of it."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.config import schema
from trainer.data import (
    Batches,
    EmbeddedSource,
    HubSource,
    PreparedSource,
    PythonSource,
    Source,
    TextSource,
    check_prepared,
    prepare,
)
from trainer.data.custom import custom_loaders, text_source
from trainer.data.dataset import Dataset
from trainer.data.files import explain_columns
from trainer.data.mixture import MixedManifest, Mixture, ReplicaShares, parse_stages
from trainer.data.shards import MANIFEST
from trainer.data.tokenizer import DownloadFailed, is_missing, vocabulary_file
from trainer.errors import UserError
from trainer.observe.preparing import show_progress

# what a program gives in place of the configuration's
CustomData = Iterable[str] | Batches


def build_source(c: schema.Data) -> Source:
    """The source that the text is read from."""
    match c.source:
        case "embedded":
            return EmbeddedSource()
        case "python":
            return PythonSource()
        case "text":
            assert c.column is not None  # validated
            return TextSource(c.paths, c.format, c.column, c.max_documents)
        case "hf":
            assert c.name is not None  # validated, as the others are
            assert c.column is not None
            assert c.split is not None
            return HubSource(
                c.name,
                config=c.config,
                split=c.split,
                column=c.column,
                revision=c.revision,
                streaming=c.streaming,
                max_documents=c.max_documents,
                max_tokens=c.max_tokens,
            )
        case "prepared":
            assert c.prepared_dir is not None  # validated
            return PreparedSource(Path(c.prepared_dir))
        case "mix":
            raise AssertionError("a mixture has several sources: open_mixture")


def build_data(c: schema.Config, own: CustomData | None = None) -> Dataset:
    """Prepare the data unless it is prepared already, and open both parts; `own` takes
    the place of `data`.
    """
    if own is not None and not isinstance(own, Iterable):
        loaders = custom_loaders(
            own, steps=c.train.steps, context=c.model.context, batch_size=c.batch_size
        )
        return Dataset(*loaders, loaders[0].manifest.directory)
    if own is None and c.data.source == "mix":
        return open_mixture(c)
    source = build_source(c.data) if own is None else None
    if own is not None:
        if c.data.cache_dir is None:
            raise UserError(
                "texts of your own are prepared in data.cache_dir, which is null; give"
                " it a directory"
            )
        source = text_source(own, Path(c.data.cache_dir))
    assert source is not None
    try:
        directory = prepared(source, c.data, c.data.tokenizer)
    except DownloadFailed as error:
        raise UserError(f"{error}{with_weights(c.init_from)}") from error
    return Dataset.open(directory, **settings_of_loaders(c))


@contextlib.contextmanager
def where_begun(c: schema.Config, run_dir: Path) -> Iterator[schema.Config]:
    """A run's configuration from wherever its directory is looked at; inside, relative
    paths are those of its start.

    Where that was, the end of the directory's path tells: `run_dir=runs/a` that is now
    /x/runs/a was begun in /x, unless it is also runs/a of where we are, as through a
    link. Of an absolute one nothing is known: it is here. A tokenizer whose files are
    gone is the run's own copy of it.
    """
    end, path = Path(c.run_dir).parts, Path(os.path.abspath(run_dir))
    is_here = Path(c.run_dir).exists() and Path(c.run_dir).samefile(path)
    begun = (
        Path(*path.parts[: -len(end)])
        if not is_here and path.parts[-len(end) :] == end
        else Path.cwd()
    )
    data, name = c.data, c.data.tokenizer
    if begun != Path.cwd():
        whole = lambda path: path and str(begun / Path(path).expanduser())
        cache, prepared = whole(data.cache_dir), whole(data.prepared_dir)
        sources = data.sources and tuple(map(whole, data.sources))
        data = dataclasses.replace(
            data, cache_dir=cache, prepared_dir=prepared, sources=sources
        )
    with contextlib.chdir(begun):
        if name is not None and is_missing(name) and vocabulary_file(path).is_file():
            data = dataclasses.replace(data, tokenizer=str(vocabulary_file(path)))
        yield dataclasses.replace(c, data=data)


def with_weights(init_from: str | None) -> str:
    """Which tokenizer is at hand, to be appended: that of the weights, where one is in
    their directory.
    """
    files = ("tokenizer.json", "tokenizer.tiktoken", "merges.txt", "vocab.bpe")
    beside = init_from is not None and any(
        (Path(init_from) / file).is_file() for file in files
    )
    return f"; that of the weights is data.tokenizer={init_from}" if beside else ""


def settings_of_loaders(c: schema.Config) -> dict[str, Any]:
    """What `Dataset.open` takes beside the directory."""
    return {
        "context": c.model.context,
        "batch_size": c.batch_size,
        "seed": c.seed,
        "document_mask": c.data.document_mask,
    }


def prepared(source: Source, c: schema.Data, tokenizer: str | None) -> Path:
    """The prepared directory of a source, made if need be."""
    if isinstance(source, PreparedSource):
        return check_prepared(source.directory, tokenizer)
    assert c.cache_dir is not None  # validated, as the next is
    assert c.val_fraction is not None
    with show_progress() as progress:
        return prepare(
            source,
            tokenizer,
            Path(c.cache_dir),
            val_fraction=c.val_fraction,
            workers=c.workers,
            progress=progress,
        )


def open_mixture(c: schema.Config) -> Dataset:
    """The loaders of several prepared directories, or files of text that are prepared
    first, in their shares.
    """
    data = c.data
    assert data.sources is not None  # validated, as the next is
    assert data.column is not None
    names = names_of(data.sources)
    stages = parse_stages(data.weights or (1.0,) * len(names), data.stages or (), names)
    sources: list[Source] = [
        (
            PreparedSource(Path(path))
            if (Path(path) / MANIFEST).is_file()
            else TextSource((path,), column=data.column)
        )
        for path in data.sources
    ]
    directories = explain_columns(
        (prepared(source, data, data.tokenizer) for source in sources), len(sources)
    )
    parts = {
        n: Dataset.open(path, **settings_of_loaders(c))
        for n, path in zip(names, directories, strict=True)
    }
    manifest = MixedManifest.merge(
        {name: part.manifest for name, part in parts.items()}
    )
    apart_of = (
        ReplicaShares(len(names), c.batch_size, c.train.grad_accum_steps)
        if c.diloco.data == "sources"
        else None
    )
    train = Mixture(
        {n: part.train for n, part in parts.items()},
        manifest,
        "train",
        stages,
        c.seed,
        apart_of,
    )
    last = [stages[-1]._replace(step=0)]  # what the run ends on, in every validation
    val = Mixture(
        {n: part.val for n, part in parts.items()}, manifest, "val", last, c.seed
    )
    return Dataset(
        train, val, next(iter(parts.values())).tokenizer, manifest.directory, val.parts
    )


def names_of(paths: Iterable[str]) -> list[str]:
    """What the sources of a mixture are called: the last parts of their paths.
    UserError for two of one name.
    """
    # of `.` too; links keep their own names
    names = [Path(os.path.abspath(path)).stem for path in paths]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(
            f"data.sources: two are called {twice[0]}; give one another name, by a link"
            " for example"
        )
    return names
