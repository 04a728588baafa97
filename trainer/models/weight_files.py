"""Hugging Face's directories of weights: safetensors, with an index, and config.json.

Names of tensors and required settings are up to each family.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import load_file, save_file

from trainer.errors import UserError
from trainer.files import (
    PARTIAL,
    check_regular,
    directory_of,
    has_file,
    read_file,
    read_object,
    write_atomically,
)
from trainer.models.fp8_checkpoints import DTYPES, QUANTIZATION, Fp8ScaleLayout
from trainer.models.other_formats import check_format, check_tensor_names

CONFIG, INDEX, SINGLE = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
MODELOPT = "hf_quant_config.json"  # holds what others have in QUANTIZATION
HEAD = "lm_head.weight"
# The default of transformers 4.
SHARD_BYTES = 5 * 10**9
# A bound of what is read into memory from a directory of somebody else.
TOKENIZER_BYTES = 1 << 28
# A tokenizer consists of these files: a copy of them is the same tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a directory with a file for each template


def config_beside(path: Path) -> Path:
    """Return the path of the config.json of a directory or file of weights."""
    return directory_of(path) / CONFIG


def read_tensors(
    path: Path, fp8: Fp8ScaleLayout | None = None
) -> dict[str, np.ndarray]:
    """Return all tensors of a directory or of one safetensors file, by name.

    Args:
      path: the directory or file.
      fp8: the FP8 weights among them; None: there are none.

    Raises:
      UserError: missing or damaged files, or an index that names missing files or
          tensors.
    """
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give a Hugging Face directory or a safetensors"
            " file"
        )
    # Before the search for files, which would only say that there are none.
    check_format(path)
    files: list[Path] = [path]
    file_names: dict[str, str] = {}
    if path.is_dir():
        files, file_names = weight_files(path), indexed_names(path)
    tensors: dict[str, np.ndarray] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        # The index decides between copies of a tensor in several files.
        file_tensors = {
            name: tensor
            for name, tensor in read_tensor_file(file, fp8).items()
            if file_names.get(name, file.name) == file.name
        }
        repeated = sorted(file_tensors.keys() & file_of.keys())
        # Nothing tells which of the two is the trained one.
        if repeated:
            name = repeated[0]
            raise UserError(
                f"{file} and {file_of[name].name} both hold {name} ({len(repeated)}"
                " tensors twice in all); leave only one of them in the directory"
            )
        # With FP8, names of scales are expected: the rest is checked when these are
        # gone.
        if fp8 is None:
            check_tensor_names(file, file_tensors)
        tensors |= file_tensors
        file_of |= dict.fromkeys(file_tensors, file)
    # The head of a tied model may be in the index alone. Others cannot do without it.
    absent = sorted(file_names.keys() - tensors.keys() - {HEAD})
    if absent:
        raise UserError(
            f"{path / INDEX} names tensors that its files do not hold: {absent[0]}"
            f" ({len(absent)} in all)"
        )
    if fp8 is not None:
        # All files have been read: a scale may be in another file than its weight.
        tensors = fp8.widen(path, tensors)
        check_tensor_names(path, tensors)
    return tensors


def read_tensor_file(file: Path, fp8: Fp8ScaleLayout | None) -> dict[str, np.ndarray]:
    """Return all tensors of a safetensors file, by name; see `read_tensors`."""
    # A named pipe would never end, and a device may not.
    check_regular(file)
    try:
        return load_file(file) if fp8 is None else load_fp8_file(file)
    except AttributeError as error:  # NumPy lacks the dtype
        problem = f"{error}, which is not read"
        if fp8 is None:
            problem = unscaled_tensor(file)
        raise UserError(
            f"{file}: {problem}; give weights in float32, float16 or bfloat16"
        ) from error
    except SafetensorError as error:
        raise UserError(
            f"{file} is not a complete safetensors file ({error}); download or copy it"
            " again"
        ) from error


def unscaled_tensor(file: Path) -> str:
    """Describe the first tensor of a safetensors file whose dtype NumPy lacks."""
    # The library's error names a dtype and no tensor.
    with safe_open(file, "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
            try:
                tensors.get_tensor(name)
            except AttributeError:
                break
        problem = f"{name} is {tensors.get_slice(name).get_dtype()}"
    problem += f", but {CONFIG} has no {QUANTIZATION} that names its scales"
    if file.with_name(MODELOPT).is_file():
        problem += f" ({MODELOPT} of NVIDIA's ModelOpt is not read)"
    return problem


def load_fp8_file(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file that may hold FP8.

    Raises:
      SafetensorError: the file is damaged.
      AttributeError: a tensor has another type than those of `DTYPES`.
    """
    tensors = {}
    # The library's own reader for NumPy knows no FP8.
    for name, raw in deserialize(file.read_bytes()):
        dtype = DTYPES.get(raw["dtype"])
        if dtype is None:
            raise AttributeError(f"{name} is {raw['dtype']}")
        tensors[name] = np.frombuffer(raw["data"], dtype).reshape(raw["shape"])
    return tensors


def with_prefix(
    source: Path, tensors: Mapping[str, np.ndarray], prefix: str, roots: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Return tensors with a prefix before the names that begin with one of `roots`.

    transformers leaves out the prefix when it saves a model without its head.

    Raises:
      UserError: a tensor is there with and without the prefix.
    """
    named: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        full_name = prefix + name if name.startswith(roots) else name
        if full_name in named:
            raise UserError(f"{source} holds {full_name} with and without {prefix}")
        named[full_name] = tensor
    return named


def pop_tied_head(source: Path, tensors: dict[str, np.ndarray], table: str) -> None:
    """Remove the head of a tied model; it becomes the table if that is absent.

    Raises:
      UserError: head and table differ.
    """
    head = tensors.pop(HEAD, None)
    # Some programs save the shared tensor under the head's name alone.
    if head is not None and not np.array_equal(head, tensors.setdefault(table, head)):
        raise UserError(
            f"{source}: {HEAD} differs from {table}, but this model has a tied head"
            " (tie_word_embeddings=true in config.json)"
        )


def missing_tensor(
    source: Path, name: str, shape: tuple[int, ...], unknown: Set[str]
) -> UserError:
    """Return the error for a missing tensor.

    `unknown`: names of tensors in the files that the model does not have.
    """
    advice = "these are not all weights of the model"
    if unknown:
        advice = (
            f"the files hold unknown tensors instead, such as {min(unknown)}"
            f" ({len(unknown)} in all)"
        )
    elif name == HEAD:
        advice += (
            "; if its head is the token table, set tie_word_embeddings=true in"
            " config.json"
        )
    return UserError(f"{source}: tensor {name} {shape} is missing; {advice}")


def check_shape(
    source: Path, name: str, tensor: np.ndarray, shape: tuple[int, ...]
) -> None:
    """Raise UserError for a tensor of another shape."""
    if tensor.shape != shape:
        advice = ""
        if tensor.size == 0:
            advice = (
                "; DeepSpeed's ZeRO-3 leaves empty ones: its zero_to_fp32.py writes the"
                " whole weights"
            )
        raise UserError(
            f"{source}: tensor {name} has shape {tensor.shape}, expected {shape}"
            f"{advice}"
        )


def check_sizes(source: Path, sizes: Mapping[str, Any]) -> None:
    """Check that the weight files can hold a model of these sizes, before building it.

    Args:
      source: a directory or file of weights; without files nothing is checked.
      sizes: `n_layer`, `d_model` and `vocab_size`; `d_mlp` and `head_dim`, if they are
        known. A weight takes a byte at least.

    Raises:
      UserError: the weights do not fit into the files.
    """
    files = [*source.glob("*.safetensors")] if source.is_dir() else [source]
    file_bytes = sum(file.stat().st_size for file in files)
    layers, width, ids = (int(sizes[k]) for k in ("n_layer", "d_model", "vocab_size"))
    # Each layer has a matrix with the width as one side, and this as the other.
    widest = max(width, *(int(sizes.get(key) or 0) for key in ("d_mlp", "head_dim")))
    needed_bytes = layers * width * widest + ids * width
    # A byte a weight, as in FP8, is the least that any file here has.
    if files and needed_bytes > file_bytes:
        raise UserError(
            f"{config_beside(source)}: {layers:,} layers of width {width:,} and {ids:,}"
            f" ids, with matrices of {widest:,} columns, take at least"
            f" {needed_bytes:,} bytes, but the weights beside it have"
            f" {file_bytes:,}; download or copy both again"
        )


def indexed_names(directory: Path) -> dict[str, str]:
    """Return the names of all tensors, and of their files, by the index.

    Empty: no index applies.
    """
    # As `weight_files`: beside a model.safetensors an index is not read.
    if has_file(directory / SINGLE) or not has_file(directory / INDEX):
        return {}
    return weight_map(directory)


def weight_map(directory: Path) -> dict[str, str]:
    """Return the index's map from tensor names to file names."""
    names = read_object(directory / INDEX).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(
            f"{directory / INDEX} has no weight_map; download or copy it again"
        )
    for name in names.values():
        # A name with a folder could lead out of the directory.
        is_local = isinstance(name, str) and name == os.path.basename(name)
        if not is_local or not name.endswith(".safetensors"):
            raise UserError(
                f"{directory / INDEX}: weight_map names {name!r}; expected safetensors"
                " files of the same directory"
            )
    return names


def weight_files(directory: Path) -> list[Path]:
    """Return a directory's safetensors files.

    Like transformers, prefer `model.safetensors` to an index. Without either, return
    all files.
    """
    if has_file(directory / SINGLE):
        return [directory / SINGLE]
    if has_file(directory / INDEX):
        files = [
            directory / name for name in sorted(set(weight_map(directory).values()))
        ]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise UserError(
                f"{directory}: {absent[0]} is missing ({len(absent)} in all);"
                " download or copy it again"
            )
        return files
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    raise UserError(f"{directory} holds no *.safetensors; give another directory")


def write_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write one safetensors file, completely or not at all.

    It gets the permissions of the process's umask: the library's file is private.

    Raises:
      UserError: the file cannot be written, such as on a full disk.
    """
    # Not a name that ends in .safetensors, which readers take: a killed export may
    # leave it behind.
    partial = path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    umask = os.umask(0)  # reads it by setting it
    os.umask(umask)
    try:
        # transformers 4 has versions that refuse files without this entry.
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o666 & ~umask)
        partial.replace(path)
    except SafetensorError as error:  # the library raises no OSError
        raise UserError(
            f"cannot write {path}: {error}; make room, or choose another directory"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(
    directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write tensors to one file, or to several with an index above `shard_bytes`.

    Returns:
      the paths.

    Raises:
      UserError: existing weights.
    """
    # A mixture of two exports would be read as one model.
    existing = [name for name in (SINGLE, INDEX) if (directory / name).exists()]
    if existing:
        raise UserError(f"{directory / existing[0]} exists; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(split_shards(tensors, shard_bytes))
    names = [SINGLE]
    if len(shards) > 1:
        names = [
            # transformers' names of the parts.
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            for i in range(len(shards))
        ]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        # Contiguous copies of one file at a time save memory.
        data = {key: np.ascontiguousarray(tensors[key]) for key in shard}
        write_file(data, directory / name)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        # Last: where there is an index, all of its files are complete.
        write_object(directory / INDEX, index)
    return [directory / name for name in names]


def split_shards(tensors: Mapping[str, np.ndarray], size: int) -> Iterator[list[str]]:
    """Yield names of successive tensors of at most `size` bytes, or of one tensor."""
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        # `names` is empty where a tensor alone is larger than a file.
        if names and filled + tensor.nbytes > size:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += tensor.nbytes
    yield names


def write_object(file: Path, tree: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    write_atomically(file, json.dumps(tree, indent=2) + "\n")


def tokenizer_files(source: Path, more: Sequence[str] = ()) -> list[Path]:
    """Return the tokenizer's files beside weights, and the files named in `more`.

    Raises:
      UserError: a file is a link to a place outside, whose content would be published
          with a copy.
    """
    paths = [source / name for name in TOKENIZER_FILES]
    paths += sorted((source / TEMPLATES).glob("*.jinja"))
    paths += [source / name for name in more]
    files = [path for path in paths if has_file(path)]
    # In the cache of Hugging Face's hub, snapshots/REVISION consists of links to files
    # in `blobs`.
    root = source.resolve()
    blobs = root.parent.parent / "blobs"
    is_hub = root.parent.name == "snapshots" and not blobs.is_symlink()
    # A link may lead to a private file, which an export would publish.
    for file in files:
        real = file.resolve()
        if not real.is_relative_to(root) and not (is_hub and real.parent == blobs):
            raise UserError(
                f"{file} is a link to {real}; replace it by the file itself,"
                " then export again"
            )
    return files


def carry_tokenizer(files: Sequence[Path], target: Path) -> list[Path]:
    """Copy files of `tokenizer_files` into a directory; return the copies' paths."""
    copies: list[Path] = []
    for file in files:
        is_template = file.parent.name == TEMPLATES
        folder = target / TEMPLATES if is_template else target
        folder.mkdir(parents=True, exist_ok=True)
        copies.append(folder / file.name)
        # Read with a bound: a copy of somebody else's file would take any size.
        write_atomically(copies[-1], read_file(file, TOKENIZER_BYTES))
    return copies
