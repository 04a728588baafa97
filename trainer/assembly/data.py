"""Build data loaders from the configuration.

`config.combinations.validate` has refused nulls where a source needs a value: the
assertions say so to the type checker.
"""

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
    Source,
    StandardLibrarySource,
    TextSource,
    check_prepared,
    prepare,
)
from trainer.data.custom import custom_loaders, text_source
from trainer.data.dataset import Dataset, open_splits
from trainer.data.files import with_column_advice
from trainer.data.mixture import MixedManifest, Mixture, ReplicaSampler, parse_stages
from trainer.data.shards import MANIFEST
from trainer.data.tokenizer import DownloadFailed, is_missing, vocabulary_file
from trainer.errors import UserError
from trainer.files import path_of
from trainer.observe.preparing import show_progress
from trainer.text import override

# texts or batches that a program passes to `train`
CustomData = Iterable[str] | Batches


def build_source(c: schema.Data, *, may_fetch: bool = True) -> Source:
    """Return the source that the text is read from.

    `may_fetch`: see `HubSource`.
    """
    match c.source:
        case "embedded":
            return EmbeddedSource()
        case "python":
            return StandardLibrarySource()
        case "text":
            assert c.column is not None
            return TextSource(c.paths, c.format, c.column, c.max_documents)
        case "hf":
            assert c.name is not None
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
                may_fetch=may_fetch,
            )
        case "prepared":
            assert c.prepared_dir is not None
            return PreparedSource(Path(c.prepared_dir))
        case "mix":
            raise AssertionError("a mixture has several sources: open_mixture")


def build_data(
    c: schema.Config,
    custom: CustomData | None = None,
    row_multiple: int = 1,
    *,
    may_fetch: bool = True,
) -> Dataset:
    """Open the data; prepare them first if they are not prepared.

    Args:
      c: the configuration.
      custom: the program's data, instead of those of the group `data`.
      row_multiple: the number of parts into which the rows of a batch are split.
      may_fetch: see `HubSource`.
    """
    if custom is None:
        if c.data.source == "mix":
            return open_mixture(c, row_multiple)
        source = build_source(c.data, may_fetch=may_fetch)
    # `Batches` are a protocol without `__iter__`; an object that has it counts as
    # texts.
    elif isinstance(custom, Iterable):
        if c.data.cache_dir is None:
            raise UserError(
                "data.cache_dir=null, but texts of your own are prepared there; give it"
                " a directory"
            )
        # Texts of a program become a file, so that they are prepared, hashed and found
        # again as any text.
        source = text_source(custom, Path(c.data.cache_dir))
    else:
        loaders = custom_loaders(
            custom,
            steps=c.train.steps,
            context=c.model.context,
            batch_size=c.batch_size,
        )
        # A program's batches have ids already, so nothing is prepared.
        return Dataset(*loaders, loaders[0].manifest.directory)
    try:
        directory = prepare_source(source, c.data)
    except DownloadFailed as error:
        hint = tokenizer_of_weights(c.init_from)
        raise UserError(f"{error.problem}{hint}. {error.advice}") from error
    return Dataset.open(directory, **loader_settings(c, row_multiple))


def start_directory(c: schema.Config, run_dir: Path) -> Path:
    """Return the directory in which a run was started.

    A saved configuration holds paths relative to the directory in which the run was
    started. If `run_dir` ends in the saved `run_dir`, the part before is returned:
    `runs/a` found at /x/runs/a was started in /x. Otherwise, and where the saved path
    leads to `run_dir` from here, the working directory is returned.
    """
    saved, path = Path(c.run_dir), Path(os.path.abspath(run_dir))
    length = len(saved.parts)
    is_here = saved.exists() and saved.samefile(path)
    if not is_here and path.parts[-length:] == saved.parts:
        return Path(*path.parts[:-length])
    return Path.cwd()


@contextlib.contextmanager
def at_start_directory(c: schema.Config, run_dir: Path) -> Iterator[schema.Config]:
    """Change to the directory in which a run was started, and yield its configuration.

    A tokenizer whose files are gone is replaced by the run's copy.
    """
    start_dir = start_directory(c, run_dir)
    # Absolute, because the working directory changes below.
    tokenizer_copy = vocabulary_file(Path(os.path.abspath(run_dir)))
    data, tokenizer = c.data, c.data.tokenizer
    if start_dir != Path.cwd():
        # Loaders open shards later, when the working directory is the caller's again.

        def absolute(path: str | None) -> str | None:
            # `/` keeps a path that is absolute already.
            return path and str(start_dir / path_of(path))

        data = dataclasses.replace(
            data,
            cache_dir=absolute(data.cache_dir),
            prepared_dir=absolute(data.prepared_dir),
            sources=data.sources and tuple(map(str, map(absolute, data.sources))),
        )
    with contextlib.chdir(start_dir):
        # Asked in the directory of the start, because its path may be relative.
        is_gone = tokenizer is not None and is_missing(tokenizer)
        if is_gone and tokenizer_copy.is_file():
            data = dataclasses.replace(data, tokenizer=str(tokenizer_copy))
        yield dataclasses.replace(c, data=data)


def tokenizer_of_weights(init_from: str | None) -> str:
    """Return a hint to the weights' tokenizer, to end a message; "": there is none."""
    files = ("tokenizer.json", "tokenizer.tiktoken", "merges.txt", "vocab.bpe")
    if init_from is None or not any((Path(init_from) / f).is_file() for f in files):
        return ""
    # Without the slash a directory `gpt2` would be the encoding of that name.
    directory = f"{init_from.rstrip('/')}/"
    return f"; that of the weights is {override('data.tokenizer', directory)}"


def loader_settings(c: schema.Config, row_multiple: int) -> dict[str, Any]:
    """Return the settings of `open_splits`."""
    return {
        "context": c.model.context,
        "batch_size": c.batch_size,
        "seed": c.seed,
        "document_mask": c.data.document_mask,
        "row_multiple": row_multiple,
    }


def prepare_source(source: Source, c: schema.Data) -> Path:
    """Return the prepared directory of a source; prepare it if there is none."""
    # Nothing is prepared, but its manifest is compared with the tokenizer that is asked
    # for.
    if isinstance(source, PreparedSource):
        return check_prepared(source.directory, c.tokenizer)
    assert c.cache_dir is not None
    assert c.val_fraction is not None
    with show_progress() as progress:
        return prepare(
            source,
            c.tokenizer,
            Path(c.cache_dir),
            val_fraction=c.val_fraction,
            workers=c.workers,
            progress=progress,
        )


def open_mixture(c: schema.Config, row_multiple: int) -> Dataset:
    """Open a mixture of prepared directories; prepare those sources that are text."""
    data = c.data
    assert data.sources is not None
    assert data.column is not None
    names = source_names(data.sources)
    # Weights and stages are checked before hours of preparation.
    stages = parse_stages(data.weights or (1.0,) * len(names), data.stages or (), names)
    sources: list[Source] = []
    for path in data.sources:
        # A manifest tells a prepared directory from a directory of text.
        if (Path(path) / MANIFEST).is_file():
            sources.append(PreparedSource(Path(path)))
        else:
            sources.append(TextSource((path,), column=data.column))
    directories = with_column_advice(
        (prepare_source(source, data) for source in sources), len(sources)
    )
    splits = {
        name: open_splits(directory, **loader_settings(c, row_multiple))
        for name, directory in zip(names, directories, strict=True)
    }
    training = {name: train for name, (train, _) in splits.items()}
    validation = {name: val for name, (_, val) in splits.items()}
    manifest = MixedManifest.merge(
        {name: loader.manifest for name, loader in training.items()}
    )
    replica_sampler = None
    # Each replica's rows of a batch come from its own source, so shares are not drawn.
    if c.diloco.data == "sources":
        replica_sampler = ReplicaSampler(
            len(names), c.batch_size, c.train.grad_accum_steps
        )
    train = Mixture.for_training(
        training,
        manifest,
        stages,
        seed=c.seed,
        sampler=replica_sampler,
    )
    val = Mixture.for_validation(
        validation,
        manifest,
        # Shares that change between validations would bend the curve of the loss.
        stages[-1],
        batch_size=c.batch_size,
        row_multiple=row_multiple,
    )
    # Each directory's tokenizer is checked, though all are equal.
    tokenizer, *_ = [loader.manifest.get_tokenizer() for loader in training.values()]
    return Dataset(train, val, tokenizer, manifest.directory, validation)


def source_names(paths: Iterable[str]) -> list[str]:
    """Return the names of a mixture's sources: the last parts of their paths.

    The suffix of a file is left out. A directory's name may have points in it.

    Raises:
      UserError: two sources have the same name.
    """
    # `abspath` turns `.` into a name. Unlike `resolve` it keeps the name of a link.
    absolute_paths = [Path(os.path.abspath(path)) for path in paths]
    names = [path.name if path.is_dir() else path.stem for path in absolute_paths]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"data.sources: two are called {name}; give one another name, by a link"
                " for example"
            )
    return names
