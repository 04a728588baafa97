"""Load a saved run, to sample from it, export it or evaluate it.

A run directory may come from somebody else: nothing is written through links in it, and
no cache that its configuration names is used.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.assembly.build import build_model, build_workload
from trainer.assembly.data import at_start_directory
from trainer.config import schema
from trainer.config.fields import to_tree
from trainer.config.phases import phase_at, precisions_until
from trainer.config.resume import COMPILE_CACHE, DATA_CACHE, default_cache
from trainer.data import Tokenizer
from trainer.data.custom import NumberTokenizer
from trainer.errors import UserError
from trainer.files import MAX_DIGITS, parse_json, path_of, read_file
from trainer.models.custom import CUSTOM
from trainer.models.family import LanguageModel, Spec
from trainer.models.model_functions import Params
from trainer.run.checkpoint import Checkpointer, Restored
from trainer.run.compatibility import data_difference
from trainer.run.initial_weights import restore_weights, tokenizer_of_run
from trainer.run.libraries import prepare_jax, use_compilation_cache
from trainer.run.metadata import saved_config
from trainer.run.start import check_state_finite
from trainer.step.state import from_checkpoint_form
from trainer.text import note
from trainer.workload import Workload, abstract_state


class SavedModel(NamedTuple):
    """The model of a saved run, with its parameters on the first device.

    Attributes:
      spec: the model's spec.
      bind: a function from parameters to the model.
      params: the parameters in FP32.
      tokenizer: the tokenizer of the run's data.
      config: the run's configuration, in the phase of its step.
      precisions: names of the precisions of its phases up to that step.
      step: the checkpoint's step.
      trained_tokens: the number of tokens that the model was trained on.
      forked: the run and the step of which the run is a fork; None: it is no fork.
    """

    spec: Spec
    bind: Callable[[Params], LanguageModel]
    params: Params
    tokenizer: Tokenizer
    config: schema.Config
    precisions: list[str]
    step: int
    trained_tokens: int
    forked: Mapping[str, Any] | None


def restore_run(run_dir: Path, step: str = "newest") -> SavedModel:
    """Return the model of a run's checkpoint, with its tokenizer.

    `step`: a number, "newest" or "best".

    Raises:
      UserError: there is no such checkpoint, or a program made its model or token ids.
    """
    with open_checkpoint(run_dir, step) as saved:
        checkpointer, meta, c = saved.checkpointer, saved.meta, saved.config
        # The run's copy: the tokenizer that the settings name may have changed, or be
        # elsewhere.
        tokenizer = tokenizer_of_run(run_dir, meta)
        model = build_model(c.model, c.precision.policy, tokenizer.vocab_size)
        params = restore_weights(checkpointer, model.sampling.shapes, saved.step)
    return SavedModel(
        model.spec,
        model.sampling.bind,
        params,
        tokenizer,
        c,
        precisions_until(saved_config(meta), saved.step),
        saved.step,
        meta["totals"]["tokens"],
        meta.get("forked"),
    )


def restore_training(
    run_dir: Path, step: str = "newest"
) -> tuple[schema.Config, Workload, Restored]:
    """Return a run's configuration, its workload on one device, and a checkpoint.

    The optimizer's state is left out. `step`: a number, "newest" or "best".

    Raises:
      UserError: there is no checkpoint, it is not finite, or the data have changed.
    """
    with open_checkpoint(run_dir, step) as saved:
        meta, c = saved.meta, saved.config
        # The run may have used more devices than there are here.
        parallel = dataclasses.replace(c.parallel, data=1, fsdp=1, tensor=1)
        c = dataclasses.replace(
            c,
            parallel=parallel,
            # All fields are None: no replicas.
            diloco=schema.DiLoCo(**dict.fromkeys(to_tree(c.diloco))),
        )
        # Before the change of directory, after which a relative path would lead to the
        # run's.
        cache = own_cache()
        # Saved paths are relative to where the run was started.
        with at_start_directory(c, run_dir) as c:
            c_for_data = without_saved_cache(c, meta["data"], cache)
            w = build_workload(c_for_data, is_saved=True)
        # The run's rows per device decide which matmuls were in FP8.
        model = w.model._replace(rows=meta.get("rows")).remade()
        w = w._replace(task=w.task._replace(model=model))
        # A text that was changed since has other validation tokens: losses could not be
        # compared with the run's.
        if data_difference(meta, w.data.manifest):
            raise UserError(
                f"{run_dir} was trained on other data than {w.data.directory}; restore"
                " its text"
            )
        checkpoint = saved.checkpointer.restore(
            # With Adam moments are half of a checkpoint's bytes or more, and nobody
            # reads them here.
            dataclasses.replace(abstract_state(w.task), opt_state=()),
            saved.step,
            partial=True,
        )
        where = f"checkpoint {checkpoint.step} of {run_dir}"
        check_state_finite(checkpoint, where, "bring an earlier one back")
    return c, w, checkpoint._replace(state=from_checkpoint_form(checkpoint.state))


class OpenCheckpoint(NamedTuple):
    """A checkpoint that is open for reading.

    Attributes:
      checkpointer: the run's checkpoints.
      step: the step of the checkpoint.
      meta: the checkpoint's meta.
      config: the run's configuration, in the phase of the step.
    """

    checkpointer: Checkpointer
    step: int
    meta: dict[str, Any]
    config: schema.Config


@contextlib.contextmanager
def open_checkpoint(run_dir: Path, step: str | int) -> Iterator[OpenCheckpoint]:
    """Open a run's checkpoint for reading.

    Arguments and errors are those of `restore_training`.
    """
    prepare_jax()
    with checkpoints_of(run_dir) as checkpointer:
        number, meta, _ = checkpointer.manifest(parse_step(checkpointer, step))
        # Before the configuration is read, which describes neither of them.
        check_not_custom(run_dir, meta)
        c = phase_at(saved_config(meta), number)
        keep_compiled(c)
        yield OpenCheckpoint(checkpointer, number, meta, c)


def parse_step(checkpointer: Checkpointer, step: str | int) -> int | None:
    """Return the step of a request; None: the newest readable checkpoint.

    Raises:
      UserError: `step` is not valid, or no checkpoint has a validation loss.
    """
    if step == "newest":
        return None
    if isinstance(step, int) or (step.isdecimal() and len(step) <= MAX_DIGITS):
        return int(step)
    if step != "best":
        raise UserError(
            f"step={step[:100]}: expected newest, best, or a number of steps"
        )
    best = checkpointer.best_step
    if best is None:
        raise UserError(
            f"step=best: no checkpoint in {checkpointer.directory} has a validation"
            f" loss; there are: {', '.join(map(str, checkpointer.steps()))}"
        )
    return best


def without_saved_cache(
    c: schema.Config, fingerprint: str, cache: Path
) -> schema.Config:
    """Replace the directory for prepared data of a saved configuration.

    A stranger's configuration could name a private text, to be prepared where the
    stranger reads it. So the saved directory is only read: if it holds the data of the
    run, they are opened there. Otherwise they are prepared in `cache`.

    Args:
      c: the configuration of a checkpoint.
      fingerprint: the fingerprint of the data that the run was trained on.
      cache: the user's own directory for prepared data.
    """
    data = dataclasses.replace(c.data, cache_dir=str(cache))
    saved = path_of(c.data.cache_dir or cache)
    for file in sorted(saved.glob("*/manifest.json")):
        # The directory is a stranger's: other files of that name are passed over.
        with contextlib.suppress(OSError, UserError, ValueError, TypeError, KeyError):
            if parse_json(read_file(file))["fingerprint"] == fingerprint:
                # Read as prepared data, which writes nothing there.
                data = dataclasses.replace(
                    data, source="prepared", prepared_dir=str(file.parent.absolute())
                )
                break
    return dataclasses.replace(c, data=data)


def own_cache() -> Path:
    """Return the user's directory for prepared data, in the working directory."""
    directory = default_cache(DATA_CACHE)
    assert directory is not None
    return path_of(directory).absolute()


def check_not_custom(run_dir: Path, meta: Mapping[str, Any]) -> None:
    """Raise UserError for a run whose model or token ids came from a program.

    Its configuration cannot rebuild them.
    """
    if meta["model"].get("family") == CUSTOM.name:
        custom_part = "a model"
    elif meta["tokenizer"] == NumberTokenizer.name:
        custom_part = "token ids"
    else:
        return
    raise UserError(
        f"{run_dir} was trained by a program with {custom_part} of its own; only that"
        " program can resume it"
    )


def keep_compiled(c: schema.Config) -> None:
    """Use this machine's cache of compiled programs, unless the run had none.

    The run's own cache is not trusted.
    """
    warning = use_compilation_cache(
        None if c.compile_cache is None else default_cache(COMPILE_CACHE)
    )
    if warning is not None:
        note(warning)


def checkpoints_of(run_dir: Path) -> Checkpointer:
    """Open a run's checkpoints for reading. Raises UserError if there are none."""
    if not (run_dir / "checkpoints").is_dir():
        raise UserError(
            f"{run_dir} is not a run directory: it has no checkpoints; give the run_dir"
            " of a training run"
        )
    return Checkpointer.reading(run_dir / "checkpoints")
