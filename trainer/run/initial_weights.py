"""Weights that a run starts from, `init_from`: a run, a Hugging Face directory or a
safetensors file.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from scalify_core import tree, weights
from trainer.data.hf_tokenizer import (
    encoding_difference,
    token_difference,
    token_ids_in,
    tokenizer_in,
)
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_saved, vocabulary_file
from trainer.data.tokenizer_settings import MODEL_CONFIGS
from trainer.errors import UserError
from trainer.files import ORIGIN, directory_of, read_object
from trainer.models import huggingface
from trainer.models.family import Spec
from trainer.models.model_functions import Params
from trainer.models.registry import SPECS, family_of
from trainer.models.weight_files import (
    CONFIG,
    carry_tokenizer,
    config_beside,
    tokenizer_files,
)
from trainer.parallel.processes import check_same_content
from trainer.run.checkpoint import Checkpointer
from trainer.run.compatibility import (
    FROM_INIT,
    TokenizerMismatch,
    architecture,
    check_same_model,
)
from trainer.step.state_tree import as_saved, first_nonfinite_leaf, leaf_names
from trainer.text import override

NEW_ROWS = ", or init.embeddings=focus to make embedding rows for the data's tokens"


def restore_weights(
    checkpointer: Checkpointer, like: Params, step: int | None = None
) -> Params:
    """Return the weights of a checkpoint of any precision in FP32, placed as `like`.

    `step` None: of the newest checkpoint. Raises UserError for a weight that is not
    finite.
    """
    target = as_saved({"params": like}, checkpointer.manifest(step).leaves)
    checkpoint = checkpointer.restore(target, step, partial=True)
    name = first_nonfinite_leaf(checkpoint.state)
    if name is not None:
        raise UserError(
            f"checkpoint {checkpoint.step} in {checkpointer.directory}: {name} is not"
            " finite; choose another run"
        )
    return weights.wide(checkpoint.state["params"])


def initial_weights(
    source: Path, spec: Spec, tokenizer: Tokenizer, like: Params
) -> Params:
    """Load weights, placed and typed as `like`.

    Args:
      source: a run, a Hugging Face directory or a safetensors file.
      spec: the model that loads them.
      tokenizer: the data's, which must be that of the weights.
      like: the untrained parameters.

    Raises:
      UserError: another architecture, another tokenizer, or a weight is not finite.
    """
    params = saved_weights(source, spec, like, tokenizer)
    return jax.tree.map(place_cropped, params, like)


def saved_weights(
    source: Path,
    spec: Spec,
    like: Params,
    tokenizer: Tokenizer | None,
) -> Params:
    """Return weights as they were saved, in FP32; those of a run are placed as `like`.

    Arguments and errors are those of `initial_weights`. With `tokenizer` None the
    weights may have any tokenizer; their embeddings keep their own rows.
    """
    key = f"init_from={source}"

    def check(saved: Mapping[str, Any], mismatch: TokenizerMismatch | None) -> None:
        comparable = with_context_of(spec, key, saved)
        if tokenizer is None:
            # The caller makes new rows, so the sizes of the vocabularies may differ.
            comparable["vocab_size"] = spec.architecture()["vocab_size"]
        check_same_model(key, comparable, spec, FROM_INIT, mismatch)

    mismatch: TokenizerMismatch | None = None
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            meta = checkpointer.manifest().meta
            sizes = {"context": meta["model"]["context"]}
            if tokenizer is None:
                sizes["vocab_size"] = meta["model"]["vocab_size"]
            else:
                mismatch = run_tokenizer_mismatch(source, meta, tokenizer)
            check(meta["model"], mismatch)
            return restore_weights(checkpointer, with_row_counts(spec, like, sizes))
    saved_spec, params = huggingface.load(source, spec)
    if tokenizer is not None:
        mismatch = hf_tokenizer_mismatch(source, saved_spec, tokenizer)
    check(architecture(saved_spec), mismatch)
    if spec.scan_layers:
        params = family_of(spec).stack_layers(params)
    check_weights_finite(key, params)
    return params


def with_context_of(spec: Spec, key: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture of weights with the context of the model that loads them.

    The context length is a limit and does not change what the model computes. But
    learned positions need a row for each position.

    Args:
      spec: the model that loads the weights.
      key: the weights, as the user named them.
      saved: the architecture of the weights.

    Raises:
      UserError: the model has learned positions for more tokens than the weights.
    """
    limit = saved["context"]
    context = spec.context
    if context > limit and any(jax.tree.leaves(row_arrays_of(spec, "context"))):
        raise UserError(
            f"{key} has learned positions for {limit:,} tokens,"
            f" model.context={context}; valid: at most {limit}"
        )
    return {**saved, "context": context}


def shapes_of(spec: Any, **sizes: int) -> Any:
    """Return the shapes of parameters at other sizes; nothing is allocated."""
    changed = dataclasses.replace(spec, **sizes)
    return jax.eval_shape(family_of(changed).build(changed).init, jax.random.key(0))


def row_arrays_of(spec: Spec, key: str) -> Any:
    """Return, as booleans in their structure, which parameters have a row for each
    position (`context`) or for each id (`vocab_size`): embeddings and LM head. Axis 0
    counts the rows.
    """
    # Many more rows: the shapes differ even if the rows are padded to a multiple.
    larger = shapes_of(spec, **{key: 2 * getattr(spec, key) + 4096})
    return jax.tree.map(lambda a, b: a.shape != b.shape, shapes_of(spec), larger)


def with_row_counts(spec: Spec, like: Params, sizes: Mapping[str, int]) -> Params:
    """Return `like` with embeddings of these sizes, as the target of a restore.

    An array of another size than in `like` is unsharded: the mesh need not divide it.
    """

    def target(shape: Any, leaf: jax.Array) -> Any:
        if shape.shape == leaf.shape:
            return leaf
        sharding: Any = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(target, shapes_of(spec, **sizes), like)


def place_cropped(new: Any, like: jax.Array) -> jax.Array:
    """Return the first rows of an array, placed and typed as `like`."""
    return jax.device_put(new[: len(like)].astype(like.dtype), like.sharding)


def check_weights_finite(key: str, params: Params) -> None:
    """Raise UserError if a weight is not finite, or differs between processes.

    Call it before `jax.device_put`, which asserts that all processes pass equal values;
    NaN is unequal to itself.
    """
    for name, array in zip(
        leaf_names({"params": params}), jax.tree.leaves(params), strict=True
    ):
        if not np.isfinite(np.asarray(array, np.float32)).all():
            raise UserError(f"{key}: {name} is not finite; choose other weights")
    if jax.process_count() > 1:
        crc = 0
        for array in jax.tree.leaves(params):
            crc = zlib.crc32(
                np.ascontiguousarray(array).reshape(-1).view(np.uint8), crc
            )
        check_same_content({key: crc})


def tokenizer_of_run(run_dir: Path, meta: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in a run directory.

    Raises UserError if it is not the one that the checkpoint's meta names.
    """
    tokenizer = load_saved(meta["tokenizer"], run_dir)
    if tokenizer.fingerprint != meta["tokenizer_fingerprint"]:
        raise UserError(
            f"the tokenizer in {run_dir} is not that of its checkpoints: its files"
            " were changed; restore them from a backup"
        )
    return tokenizer


def run_tokenizer_mismatch(
    run_dir: Path, meta: Mapping[str, Any], tokenizer: Tokenizer
) -> TokenizerMismatch | None:
    """Return how a run's tokenizer differs from the data's; None: it does not."""
    if meta["tokenizer_fingerprint"] == tokenizer.fingerprint:
        return None
    file = (
        "byte" if meta["tokenizer"] == ByteTokenizer.name else vocabulary_file(run_dir)
    )
    return TokenizerMismatch(
        f"was trained with tokenizer {meta['tokenizer']} of"
        f" {meta['model']['vocab_size']:,} ids (the data's is {tokenizer.name},"
        f" {tokenizer.vocab_size:,} ids)",
        f"set {override('data.tokenizer', file)}{NEW_ROWS}",
    )


def keep_tokenizer(
    sources: Sequence[Path], run_dir: Path, tokenizer: Tokenizer
) -> None:
    """Copy the tokenizer's files beside the weights into a run directory, for an export
    of the run.

    The chat template and the generation settings are copied, too.

    Args:
      sources: directories of weights, or runs. The first with the run's tokenizer,
        beside the weights or in the run's own copy, is used.
      run_dir: the run directory.
      tokenizer: the run's.
    """
    target = run_dir / ORIGIN
    if (target / CONFIG).is_file():
        return
    directories: list[Path] = []
    for source in sources:
        directories += [source, source / ORIGIN]
    for directory in directories:
        if has_tokenizer(directory, tokenizer):
            # A symlink to a file outside of the directory raises UserError. Then
            # nothing is copied, and an export reports the link.
            with contextlib.suppress(UserError):
                # CONFIG is copied last: its presence says that the copy is complete.
                carry_tokenizer(tokenizer_files(directory, MODEL_CONFIGS), target)
            return


def has_tokenizer(directory: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a Hugging Face directory has this tokenizer beside its weights."""
    if not (directory / CONFIG).is_file():
        return False
    saved = tokenizer_in(directory)
    return saved is not None and saved.fingerprint == tokenizer.fingerprint


def hf_tokenizer_mismatch(
    source: Path, spec: Spec, tokenizer: Tokenizer
) -> TokenizerMismatch | None:
    """Return how the tokenizer of weights differs from the data's; None: no difference
    is seen.

    Without a tokenizer beside the weights the sizes of the vocabularies decide: at most
    1% of the rows may have no id.
    """
    directory = directory_of(source)
    ids = token_ids_in(directory)
    if ids is not None:
        difference = token_difference(ids, tokenizer)
        if difference is None:
            # A vocabulary does not say how a text is split or normalized.
            saved = tokenizer_in(directory)
            if saved is not None:
                difference = encoding_difference(saved, tokenizer)
        if difference is None:
            return None
        return TokenizerMismatch(
            f"has another tokenizer ({difference})",
            f"set {override('data.tokenizer', f'{directory}/')}, the data's is"
            f" {tokenizer.name} of {tokenizer.vocab_size:,} ids{NEW_ROWS}",
        )
    if 0.99 * spec.vocab_size <= tokenizer.vocab_size <= spec.vocab_size:
        return None
    return TokenizerMismatch(
        f"has {spec.vocab_size:,} ids (the data {tokenizer.vocab_size:,}): another"
        " tokenizer",
        f"set data.tokenizer to theirs, the data's is {tokenizer.name}",
    )


def describe_init(
    source: Path, tokenizer: Tokenizer, spec: Spec, params: Params
) -> str:
    """Return a line about the weights that a run starts from.

    Args:
      source: a run, a Hugging Face directory or a safetensors file.
      tokenizer: the data's, which was accepted.
      spec: the model.
      params: the weights, ScaledArrays among them.
    """
    # Not the parameter count: the line about the model has it, without padding rows.
    size = f"{len(tree.leaves(params)):,} tensors"
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            step, meta, _ = checkpointer.manifest()
            saved = meta["model"]
        return (
            f"weights from {source} after its step {step:,}: {size}; its tokenizer,"
            f" {tokenizer.name}, is that of the data"
            f"{context_difference(saved['context'], spec)}"
        )
    family = huggingface.family_at(source)
    name = (family or family_of(spec)).name
    context = ""
    if family is not None:
        config = read_object(config_beside(source))
        saved_context = SPECS[name].keys_of_huggingface(config)["context"]
        context = context_difference(saved_context, spec)
    directory = directory_of(source)
    if token_ids_in(directory) is None:
        tokenizer_text = (
            "there is no tokenizer beside them, so nobody checked whether their ids are"
            f" those of data.tokenizer={tokenizer.name}"
        )
    elif tokenizer_in(directory) is None:
        tokenizer_text = (
            f"the vocabulary beside them is that of the data, {tokenizer.name}, but"
            " their tokenizer cannot be read, so nobody checked whether it splits texts"
            " alike"
        )
    else:
        tokenizer_text = (
            f"the tokenizer beside them is that of the data, {tokenizer.name}"
        )
    return (
        f"weights from {source} (Hugging Face, {name}): {size};"
        f" {tokenizer_text}{context}"
    )


def context_difference(saved_context: int, spec: Spec) -> str:
    """Return a clause about a context that differs from the weights'; empty: it does
    not.
    """
    if spec.context == saved_context:
        return ""
    if spec.context < saved_context:
        return f"; model.context={spec.context} of the weights' {saved_context}"
    return (
        f"; model.context={spec.context}: the weights were not trained on rotary"
        f" positions beyond {saved_context}, so model.rope_scaling may be needed"
    )
