"""What a saved run holds, for whoever samples from it, exports it or evaluates it.

A run directory may come from somebody else: nothing is written where links in it lead,
and no cache that its configuration names is used.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer.assembly.build import build_model, build_policy, build_workload
from trainer.assembly.data import where_begun
from trainer.config import schema
from trainer.config.continuing import COMPILED, DATA_CACHE, default_cache
from trainer.config.fields import from_saved, to_tree
from trainer.config.phases import phase_at
from trainer.data import Tokenizer
from trainer.data.custom import NumberTokenizer
from trainer.data.tokenizer import load_saved
from trainer.errors import UserError
from trainer.files import refuse_links
from trainer.models.custom import CUSTOM
from trainer.models.family import LanguageModel, Spec
from trainer.models.functional import Params
from trainer.run.checkpoint import Checkpointer, Restored
from trainer.run.libraries import hide_missing_gpu, use_compilation_cache
from trainer.run.start import check_finite, restore_logical
from trainer.step.state import from_stored
from trainer.workload import Workload, abstract_state


class SavedModel(NamedTuple):
    """The model of a run as it was saved, with its parameters on the first device.

    Attributes:
      spec: of the model.
      bind: makes the model of parameters.
      params: in FP32.
      tokenizer: of the run's data.
    """

    spec: Spec
    bind: Callable[[Params], LanguageModel]
    params: Params
    tokenizer: Tokenizer


def restore_run(run_dir: Path) -> SavedModel:
    """The model of a run directory's newest checkpoint, and the tokenizer of its data.
    Raises UserError.
    """
    hide_missing_gpu()
    with checkpoints_of(run_dir) as checkpointer:
        meta = checkpointer.meta()
        refuse_custom(run_dir, meta)
        c = phase_at(from_saved(schema.Config, meta["config"]), checkpointer.newest())
        keep_compiled(c)
        tokenizer = load_saved(meta["tokenizer"], run_dir)
        model = build_model(c.model, build_policy(c.precision), tokenizer.vocab_size)
        like = jax.eval_shape(model.sampling.init, jax.random.key(0))
        params = restore_logical(checkpointer, like)
    return SavedModel(model.spec, model.sampling.bind, params, tokenizer)


def restore_training(run_dir: Path) -> tuple[schema.Config, Workload, Restored]:
    """A run's configuration, what it trains, on one device, and its newest checkpoint,
    without the optimiser's state.

    Raises UserError.
    """
    hide_missing_gpu()
    with checkpoints_of(run_dir) as checkpointer:
        meta = checkpointer.meta()
        refuse_custom(run_dir, meta)
        c = phase_at(from_saved(schema.Config, meta["config"]), checkpointer.newest())
        keep_compiled(c)
        parallel = dataclasses.replace(c.parallel, data=1, fsdp=1, tensor=1)
        c = dataclasses.replace(
            c,
            parallel=parallel,
            diloco=schema.DiLoCo(**dict.fromkeys(to_tree(c.diloco))),
        )
        with where_begun(without_own_cache(c, run_dir), run_dir) as c:
            w = build_workload(c)
        rows = meta.get("rows")  # of the run's devices, which may have been more
        w = w._replace(task=w.task._replace(model=w.model._replace(rows=rows).again()))
        if w.data.manifest.fingerprint != meta["data"]:
            raise UserError(
                f"{run_dir} was trained on other data than {w.data.directory}; bring"
                " its text back"
            )
        found = checkpointer.restore(
            dataclasses.replace(abstract_state(w.task), opt_state=()), partial=True
        )
        check_finite(
            found, f"checkpoint {found.step} of {run_dir}", "bring an earlier one back"
        )
    return c, w, found._replace(state=from_stored(found.state))


def without_own_cache(c: schema.Config, run_dir: Path) -> schema.Config:
    """The configuration with this machine's directory for prepared data, if its own is
    inside the run directory.

    Prepared there, a private text that the configuration of a stranger's run names
    would travel with the run.
    """
    cache = c.data.cache_dir
    if cache is None or not Path(cache).expanduser().resolve().is_relative_to(
        run_dir.resolve()
    ):
        return c
    return dataclasses.replace(
        c, data=dataclasses.replace(c.data, cache_dir=default_cache(DATA_CACHE))
    )


def refuse_custom(run_dir: Path, meta: Mapping[str, Any]) -> None:
    """Raise UserError for a run whose model or token ids a program gave: its
    configuration does not tell them.
    """
    own = (
        "a model"
        if meta["model"].get("family") == CUSTOM.name
        else "token ids" * (meta["tokenizer"] == NumberTokenizer.name)
    )
    if own:
        raise UserError(
            f"{run_dir} was trained by a program with {own} of its own; only that can"
            " go on with it"
        )


def keep_compiled(c: schema.Config) -> None:
    """Use this machine's cache of compiled programs, unless the run had none; the run's
    own is not trusted.
    """
    warning = use_compilation_cache(
        None if c.compile_cache is None else default_cache(COMPILED)
    )
    if warning is not None:
        print(warning, file=sys.stderr)


def checkpoints_of(run_dir: Path) -> Checkpointer:
    """To read. UserError where there are none."""
    if not (run_dir / "checkpoints").is_dir():
        raise UserError(
            f"{run_dir} is not a run directory: it has no checkpoints; give the run_dir"
            " of a training run"
        )
    refuse_links(run_dir)
    return Checkpointer.reading(run_dir / "checkpoints")
