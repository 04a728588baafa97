"""Directories of weights as Hugging Face keeps them: safetensors in one file or in
several with an index, config.json.

What tensors are called and what a configuration must say is each family's own affair.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from trainer.errors import UserError
from trainer.files import write_atomically

CONFIG, INDEX, WHOLE = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
SHARD_BYTES = 5 * 10**9
# What a tokenizer may consist of; a copy of these is the same tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as A; '
    "A.from_pretrained('{0}').save_pretrained('{0}-safetensors')\""
)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. UserError for anything else."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file} is not JSON ({error}); download or copy it again"
        ) from error
    if not isinstance(tree, dict):
        raise UserError(
            f"{file} is not the configuration of a model; download or copy it again"
        )
    return tree


def config_beside(path: Path) -> Path:
    """Where the configuration of a directory of weights, or of a file of them, is if
    there is one.
    """
    return (path if path.is_dir() else path.parent) / CONFIG


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory or of one safetensors file, by name, in the files'
    dtypes.

    Raises:
      UserError: no such files, an index that names files or tensors that are not there,
          a damaged file.
    """
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give a Hugging Face directory or a safetensors"
            " file"
        )
    files, named = (
        (weight_files(path), listed(path)) if path.is_dir() else ([path], None)
    )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise UserError(
                f"{file} is not a whole safetensors file ({error}); download or copy it"
                " again"
            ) from error
    lost = sorted(named - tensors.keys()) if named is not None else []
    if lost:
        raise UserError(
            f"{path / INDEX} names tensors that its files do not hold: {lost[0]}"
            f" ({len(lost)} in all)"
        )
    return tensors


def check_sizes(source: Path, sizes: Mapping[str, Any]) -> None:
    """Refuse sizes of a model that the files of its weights cannot hold, before
    anything is built of them.

    Args:
      source: a directory of weights, or a file of them; without any nothing is checked.
      sizes: `n_layer`, `d_model` and `vocab_size`. A byte is the least that a weight
          takes.

    Raises:
      UserError: so many weights do not fit.
    """
    files = [*source.glob("*.safetensors")] if source.is_dir() else [source]
    present = sum(file.stat().st_size for file in files)
    layers, width, ids = (
        int(sizes[name]) for name in ("n_layer", "d_model", "vocab_size")
    )
    least = layers * width**2 + ids * width
    if files and least > present:
        raise UserError(
            f"{config_beside(source)}: {layers:,} layers of width {width:,} and {ids:,}"
            f" ids take at least {least:,} bytes, but the weights beside it have"
            f" {present:,}; download or copy both again"
        )


def listed(directory: Path) -> set[str] | None:
    """The names of all tensors, if an index says them."""
    return set(weight_map(directory)) if (directory / INDEX).is_file() else None


def weight_map(directory: Path) -> dict[str, str]:
    """From each tensor's name to its file's, as the index has it."""
    found = read_object(directory / INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise UserError(
            f"{directory / INDEX} has no weight_map; download or copy it again"
        )
    for name in found.values():
        if (
            not isinstance(name, str)
            or name != os.path.basename(name)
            or not name.endswith(".safetensors")
        ):
            raise UserError(
                f"{directory / INDEX}: weight_map names {name!r}; expected safetensors"
                " files of the same directory"
            )
    return found


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: those that the index names if it has one,
    else all.
    """
    if (directory / INDEX).is_file():
        files = [
            directory / name for name in sorted(set(weight_map(directory).values()))
        ]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(
                f"{directory}: {missing[0]} is missing ({len(missing)} in all);"
                " download or copy it again"
            )
        return files
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if list(directory.glob("*.bin")):
        raise UserError(
            f"{directory} holds no *.safetensors but *.bin; convert it:"
            f" {CONVERT.format(directory)}"
        )
    raise UserError(f"{directory} holds no *.safetensors; give another directory")


def write_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    """One safetensors file, which may be read by whom other files of this process may:
    the library makes it private.
    """
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_tensors(
    directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write tensors, in one file or, where they are more than `shard_bytes`, in several
    with an index; their paths.

    UserError where there are weights already.
    """
    there = [name for name in (WHOLE, INDEX) if (directory / name).exists()]
    if there:
        raise UserError(f"{directory / there[0]} exists; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(parts(tensors, shard_bytes))
    several = len(shards) > 1
    names = [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" if several else WHOLE
        for i in range(len(shards))
    ]
    for name, shard in zip(names, shards, strict=True):
        # Contiguous copies, one file's at a time.
        data = {key: np.ascontiguousarray(tensors[key]) for key in shard}
        write_file(data, directory / name)
    if several:
        index = {
            "metadata": {
                "total_size": sum(tensor.nbytes for tensor in tensors.values())
            },
            "weight_map": {
                key: name
                for name, shard in zip(names, shards, strict=True)
                for key in shard
            },
        }
        write_object(directory / INDEX, index)
    return [directory / name for name in names]


def parts(tensors: Mapping[str, np.ndarray], size: int) -> Iterator[list[str]]:
    """The names of successive tensors of at most `size` bytes together, but of one at
    least.
    """
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        if names and filled + tensor.nbytes > size:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += tensor.nbytes
    yield names


def write_object(file: Path, tree: Mapping[str, Any]) -> None:
    """Write a JSON object, to be read."""
    write_atomically(file, json.dumps(tree, indent=2) + "\n")


def carry_tokenizer(source: Path, target: Path) -> list[Path]:
    """Copy what tokenizer stands beside weights into another directory, as it is; the
    paths of the copies.

    Raises:
      UserError: a file is a link to somewhere else, whose content would be published
          with the copy.
    """
    found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    # A snapshot in the cache of Hugging Face's hub, snapshots/REVISION, consists of
    # links to files of blobs beside it.
    whole = source.resolve()
    blobs = whole.parent.parent / "blobs"
    for file in found:
        target_of, is_hub = (
            file.resolve(),
            whole.parent.name == "snapshots" and not blobs.is_symlink(),
        )
        if not (
            target_of.is_relative_to(whole) or (is_hub and target_of.parent == blobs)
        ):
            raise UserError(
                f"{file} is a link to {file.resolve()}; replace it by the file itself,"
                " then export again"
            )
    for file in found:
        write_atomically(target / file.name, file.read_bytes())
    return [target / file.name for file in found]
