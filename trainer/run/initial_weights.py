"""Weights that a run starts from, `init_from`: a run, a Hugging Face directory or a
safetensors file.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scalify_core import weights
from trainer.data.hf_tokenizer import (
    encoding_difference,
    end_difference,
    token_difference,
    token_ids_in,
    tokenizer_in,
)
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_saved, vocabulary_file
from trainer.data.tokenizer_settings import MODEL_CONFIGS
from trainer.errors import UserError
from trainer.files import ORIGIN, check_not_link, directory_of
from trainer.models import huggingface
from trainer.models.blocks import stack_layers
from trainer.models.family import Spec
from trainer.models.model_functions import Params
from trainer.models.registry import family_of
from trainer.models.weight_files import (
    CONFIG,
    carry_tokenizer,
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
from trainer.step.state_tree import (
    as_saved,
    first_nonfinite_leaf,
    leaf_names,
    replicated_like,
)
from trainer.text import override

# A clause is what a run logs; a mismatch becomes part of the message that refuses it.
TokenizerComparison = TokenizerMismatch | str
NEW_ROWS = ", or init.embeddings=focus to make embedding rows for the data's tokens"


def restore_weights(
    checkpointer: Checkpointer, like: Params, step: int | None = None
) -> Params:
    """Return the weights of a checkpoint of any precision in FP32, placed as `like`.

    `step` None: of the newest checkpoint. Raises UserError for a weight that is not
    finite.
    """
    # In the dtypes that were saved, whose bits the checksums are of.
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
) -> tuple[Params, str]:
    """Load weights, placed and typed as `like`, and describe them in a line.

    Args:
      source: a run, a Hugging Face directory or a safetensors file.
      spec: the model that loads them.
      tokenizer: the data's, which must be that of the weights.
      like: the untrained parameters.

    Raises:
      UserError: another architecture, another tokenizer, or a weight is not finite.
    """
    params, line = saved_weights(source, spec, like, tokenizer)
    return jax.tree.map(place_cropped, params, like), line


def saved_weights(
    source: Path,
    spec: Spec,
    like: Params,
    tokenizer: Tokenizer | None,
) -> tuple[Params, str]:
    """Return weights as they were saved, in FP32, and a line that describes them.

    Those of a run are placed as `like`. Arguments and errors are those of
    `initial_weights`. With `tokenizer` None the weights may have any tokenizer; their
    embeddings keep their own rows.
    """
    if (source / "checkpoints").is_dir():
        return weights_of_run(source, spec, like, tokenizer)
    return weights_of_huggingface(source, spec, tokenizer)


def weights_of_run(
    source: Path, spec: Spec, like: Params, tokenizer: Tokenizer | None
) -> tuple[Params, str]:
    """Return the weights of a run's newest checkpoint; see `saved_weights`."""
    with Checkpointer.reading(source / "checkpoints") as checkpointer:
        step, meta, _ = checkpointer.manifest()
        saved = meta["model"]
        # Learned positions are restored in full, and cropped when they are placed.
        sizes = {"context": saved["context"]}
        comparison = None
        if tokenizer is None:
            # All rows of the old tokenizer are restored, since new ones are made from
            # them.
            sizes["vocab_size"] = saved["vocab_size"]
        else:
            comparison = compare_run_tokenizer(source, meta, tokenizer)
        check_weights_fit(f"init_from={source}", saved, spec, comparison)
        like = with_row_counts(spec, like, sizes)
        # By its number, so that weights and metadata are of one checkpoint.
        params = restore_weights(checkpointer, like, step)
    origin = f"{source} after its step {step:,}"
    line = describe_weights(origin, params, comparison, saved["context"], spec)
    return params, line


def weights_of_huggingface(
    source: Path, spec: Spec, tokenizer: Tokenizer | None
) -> tuple[Params, str]:
    """Return the weights of a directory or a file; see `saved_weights`."""
    key = f"init_from={source}"
    saved_spec, params = huggingface.load(source, spec)
    comparison = None
    if tokenizer is not None:
        comparison = compare_huggingface_tokenizer(source, saved_spec, tokenizer)
    check_weights_fit(key, architecture(saved_spec), spec, comparison)
    # Files of Hugging Face have each layer by itself.
    if spec.scan_layers:
        params = stack_layers(params)
    check_weights_finite(key, params)
    origin = f"{source} (Hugging Face, {family_of(spec).name})"
    line = describe_weights(origin, params, comparison, saved_spec.context, spec)
    return params, line


def check_weights_fit(
    key: str,
    saved: Mapping[str, Any],
    spec: Spec,
    comparison: TokenizerComparison | None,
) -> None:
    """Raise UserError for weights of another architecture, or for another tokenizer.

    Args:
      key: the weights, as the user named them.
      saved: their `architecture`.
      spec: the model that loads them.
      comparison: of their tokenizer with the data's; None: they were not compared.
    """
    comparable = with_context_of(spec, key, saved)
    if comparison is None:
        # The caller makes new rows, so the sizes of the vocabularies may differ.
        comparable["vocab_size"] = spec.architecture()["vocab_size"]
    mismatch = comparison if isinstance(comparison, TokenizerMismatch) else None
    check_same_model(key, comparable, spec, FROM_INIT, mismatch)


def describe_weights(
    origin: str,
    params: Params,
    comparison: TokenizerComparison | None,
    saved_context: int,
    spec: Spec,
) -> str:
    """Return a line about weights that `check_weights_fit` has accepted."""
    # Not the parameter count: the line about the model has it, without padding rows.
    size = f"{len(jax.tree.leaves(params)):,} tensors"
    tokenizers = "" if comparison is None else f"; {comparison}"
    context = context_difference(saved_context, spec)
    return f"weights from {origin}: {size}{tokenizers}{context}"


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
    # Rotary positions have no rows: there a longer context is only reported.
    if context > limit and any(jax.tree.leaves(row_arrays_of(spec, "context"))):
        raise UserError(
            f"{key} has learned positions for {limit:,} tokens,"
            f" model.context={context}; valid: at most {limit}"
        )
    return {**saved, "context": context}


def shapes_of(spec: Any, **sizes: int) -> Any:
    """Return the shapes of parameters at other sizes; nothing is allocated."""
    changed = dataclasses.replace(spec, **sizes)
    return family_of(changed).build(changed).shapes


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
        return jax.ShapeDtypeStruct(
            shape.shape, leaf.dtype, sharding=replicated_like(leaf.sharding)
        )

    return jax.tree.map(target, shapes_of(spec, **sizes), like)


def place_cropped(new: Any, like: jax.Array) -> jax.Array:
    """Return the first rows of an array, placed and typed as `like`."""
    # A shorter context drops the positions beyond it.
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
        digest = hashlib.blake2b(digest_size=16)
        for array in jax.tree.leaves(params):
            # hashlib refuses an array that is not C-contiguous, such as a transposed
            # kernel.
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        check_same_content({key: digest.hexdigest()})


def tokenizer_of_run(run_dir: Path, meta: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in a run directory.

    Raises UserError if it is not the one that the checkpoint's meta names.
    """
    tokenizer = load_saved(meta["tokenizer"], run_dir)
    # With another tokenizer of as many ids the model would read other texts without an
    # error.
    if tokenizer.fingerprint != meta["tokenizer_fingerprint"]:
        raise UserError(
            f"the tokenizer in {run_dir} is not that of its checkpoints: its files"
            " were changed; restore them from a backup"
        )
    return tokenizer


def compare_run_tokenizer(
    run_dir: Path, meta: Mapping[str, Any], tokenizer: Tokenizer
) -> TokenizerComparison:
    """Return how a run's tokenizer differs from the data's, or a clause that it does
    not.
    """
    if meta["tokenizer_fingerprint"] == tokenizer.fingerprint:
        return f"its tokenizer, {tokenizer.name}, is that of the data"
    file = (
        "byte" if meta["tokenizer"] == ByteTokenizer.name else vocabulary_file(run_dir)
    )
    return TokenizerMismatch(
        f"was trained with tokenizer {meta['tokenizer']} of"
        f" {meta['model']['vocab_size']:,} ids (the data's is {tokenizer.name},"
        f" {tokenizer.vocab_size:,} ids)",
        f"set {override('data.tokenizer', file)}{NEW_ROWS}",
    )


def keep_tokenizer(source: Path, run_dir: Path, tokenizer: Tokenizer) -> None:
    """Copy the tokenizer's files beside the weights into a run directory, for an export
    of the run.

    The chat template and the generation settings are copied, too.

    Args:
      source: a directory of weights, or a run with its own copy of such files. Nothing
        is copied if they are of another tokenizer.
      run_dir: the run directory.
      tokenizer: the run's.
    """
    target = run_dir / ORIGIN
    # Copied by an earlier start of this run.
    if (target / CONFIG).is_file():
        return
    check_not_link(source / ORIGIN)
    # A run that began with weights has their files in ORIGIN.
    for directory in (source, source / ORIGIN):
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
    # Another tokenizer's chat template would stand beside this run's ids in an export.
    saved = tokenizer_in(directory)
    return saved is not None and saved.fingerprint == tokenizer.fingerprint


def compare_huggingface_tokenizer(
    source: Path, spec: Spec, tokenizer: Tokenizer
) -> TokenizerComparison:
    """Return how the tokenizer of weights differs from the data's, or a clause about
    what was compared without a difference.

    Without a tokenizer beside the weights the sizes of the vocabularies decide: at most
    1% of the rows may have no id.
    """
    directory = directory_of(source)
    ids, other_end = token_ids_in(directory), end_difference(directory, tokenizer)
    ends = "" if other_end is None else f"; {other_end}"
    if ids is None:
        # Rows without an id are padding, such as 50,304 rows for the 50,257 ids of
        # GPT-2.
        if 0.99 * spec.vocab_size <= tokenizer.vocab_size <= spec.vocab_size:
            return (
                "there is no tokenizer beside them, so it is not checked whether their"
                f" ids are those of data.tokenizer={tokenizer.name}{ends}"
            )
        return TokenizerMismatch(
            f"has {spec.vocab_size:,} ids (the data {tokenizer.vocab_size:,}): another"
            " tokenizer",
            f"set data.tokenizer to theirs, the data's is {tokenizer.name}",
        )
    difference = token_difference(ids, tokenizer)
    if difference is None:
        saved = tokenizer_in(directory)
        if saved is None:
            return (
                f"the vocabulary beside them is that of the data, {tokenizer.name}, but"
                " their tokenizer cannot be read, so it is not checked whether it"
                f" splits texts alike{ends}"
            )
        # A vocabulary does not say how a text is split or normalized.
        difference = encoding_difference(saved, tokenizer)
    if difference is None:
        return f"the tokenizer beside them is that of the data, {tokenizer.name}{ends}"
    return TokenizerMismatch(
        f"has another tokenizer ({difference})",
        f"set {override('data.tokenizer', f'{directory}/')}, the data's is"
        f" {tokenizer.name} of {tokenizer.vocab_size:,} ids{NEW_ROWS}",
    )


def context_difference(saved_context: int, spec: Spec) -> str:
    """Return a clause about a context that differs from the weights'; empty: it does
    not.
    """
    if spec.context == saved_context:
        return ""
    # All of these positions were trained.
    if spec.context < saved_context:
        return f"; model.context={spec.context} of the weights' {saved_context}"
    scaling = getattr(spec, "rope_scaling", None)
    unused = ""
    if scaling is not None and scaling.kind == "dynamic":
        unused = (
            "; the dynamic rope_scaling of their config.json changes nothing, since it"
            " begins beyond model.context"
        )
    return (
        f"; model.context={spec.context}: the weights were not trained on rotary"
        f" positions beyond {saved_context}{unused}; linear, yarn or llama3"
        " rope_scaling in the config.json of weights stretches them"
    )
