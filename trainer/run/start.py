"""Where a run starts: at its own newest checkpoint, at another run's, from given
weights, or from nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from scalify_core import tree, weights
from trainer.data.hf_tokenizer import first_difference, ids_beside
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_saved, vocabulary_file
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.family import Spec
from trainer.models.functional import Params
from trainer.models.specs import FIRST
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.mesh import replicated
from trainer.precision.policy import Policy
from trainer.run.checkpoint import DAMAGED, Checkpointer, Restored
from trainer.run.converting import convert_state
from trainer.run.phases import Phases, policy_of, task_of, trainable_of
from trainer.step.state import TrainState, first_nonfinite
from trainer.step.state_tree import as_saved, first_nonfinite_leaf
from trainer.workload import TrainTask, abstract_state

SWAP = ", or init.embeddings=focus to give its tables the rows of the data's tokens"
FROM_INIT = ", or model=from_init, which takes all sizes from there"


def architecture(spec: Spec) -> dict[str, Any]:
    """What decides which function parameters stand for, as JSON values:
    `Spec.architecture` and the family.
    """
    return {"family": spec.family().name} | spec.architecture()


def check_same_model(
    source: str,
    theirs: Mapping[str, Any],
    spec: Spec,
    otherwise: str = "",
    tokenizer: Sequence[str] = (),
) -> None:
    """Refuse weights of another architecture, or for another tokenizer, all that
    differs in one message.

    Args:
      source: names where they are, as the user did.
      theirs: as `architecture` has it.
      spec: of the model that is to take them.
      otherwise: what else could be done about another architecture.
      tokenizer: what differs between theirs and ours, and what to do about it; empty:
          nothing does.
    """
    ours, family = spec.architecture(), spec.family().name
    found_family = theirs.get("family", FIRST)
    if found_family != family:
        raise UserError(
            f"{source} has a {found_family}, the model is a {family}; choose another"
            f" model{otherwise}"
        )
    if tokenizer:
        del ours["vocab_size"]  # follows from it
    different = {
        name: value
        for name, value in ours.items()
        if not spec.agrees(name, theirs[name])
    }
    if not different and not tokenizer:
        return
    found = [
        f"has {name}={theirs[name]} (the model {value})"
        for name, value in different.items()
    ]
    sizes = " ".join(f"model.{name}={theirs[name]}" for name in different)
    advice = [f"set {sizes}{otherwise}"] if different else []
    raise UserError(
        f"{source} {', '.join([*found, *tokenizer[:1]])};"
        f" {'; '.join([*advice, *tokenizer[1:]])}"
    )


def check_start(
    run_dir: Path, source: str, step: int | None, init_from: str | None
) -> None:
    """Refuse what no run can start from: at once, before anything is prepared for it.

    Args:
      run_dir: of the run.
      source: as `starting_point` has it.
      step: of the other run's checkpoint; None: of the newest.
      init_from: where the weights come from; None: from nowhere.

    Raises:
      UserError: `none` but there are checkpoints, no such run directory or checkpoint,
          no such weights.
    """
    own = saved_steps(run_dir)
    if own and source == "none":
        raise UserError(
            f"run_dir={run_dir} holds checkpoints of steps {own} and resume=none; "
            "choose another run_dir, or resume=auto to continue"
        )
    if own:
        return
    folder = run_dir / "checkpoints" / DAMAGED
    if any(folder.glob("*")):
        # Or the same command, given again, would begin at step 0 and cut the log.
        raise UserError(
            f"no usable checkpoint in run_dir={run_dir}: all are damaged, and in"
            f" {folder}; bring a whole one back from a copy, or choose another run_dir,"
            f" or remove {folder} to start this run anew"
        )
    if source in ("auto", "none"):
        if step is not None:
            raise UserError(
                f"resume.step={step} is of another run's checkpoints; add resume=RUN,"
                " or leave it out"
            )
        if init_from is not None and not Path(init_from).exists():
            raise UserError(
                f"init_from={init_from} does not exist; valid: a run directory, a"
                " Hugging Face directory, or a .safetensors file"
            )
        return
    there = saved_steps(Path(source))
    if not there:
        raise UserError(
            f"resume={source} has no checkpoints; {runs_below(Path(source))}"
        )
    if step is not None and step not in there:
        raise UserError(
            f"resume.step={step}, but resume={source} has checkpoints of steps"
            f" {', '.join(map(str, there))}; a run saves one every checkpoint.every"
            " steps and at its end, and keeps the newest checkpoint.keep and the best:"
            " set these in a run that is to be forked"
        )


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of the checkpoints in a run directory, ascending, by the names of their
    directories.
    """
    return sorted(
        int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit()
    )


def runs_below(directory: Path) -> str:
    """What could be meant by a directory that is no run: one of the runs in it, if
    there are any.
    """
    runs = sorted(
        (path.parent for path in directory.glob("*/checkpoints")),
        key=lambda path: (len(path.name), path.name),
    )
    if not runs:
        return "valid: auto, none, or a run directory"
    listed = ", ".join(str(path) for path in runs[:8]) + ", ..." * (len(runs) > 8)
    return (
        f"name one of the runs in it: {listed}; `python -m scripts.compare"
        f" runs={directory}` says which is the best"
    )


def starting_point(
    source: str,
    run_dir: Path,
    own: Checkpointer,
    phases: Phases,
    first: Callable[[], TrainState],
    *,
    step: int | None,
    convert: bool,
) -> Restored:
    """State, steps taken and meta to start from; all weights and moments are finite.
    Waits for the state.

    Args:
      source: `auto` continues `run_dir` where it holds a checkpoint; `none` does not;
        anything else is a run directory, from whose checkpoint a `run_dir` without one
        starts. `check_start` has looked at it.
      own: the checkpoints of `run_dir`.
      phases: what is trained, in its precisions.
      first: makes the state before step 0.
      step: of that checkpoint; None: of the newest.
      convert: whether another run's state may be in another precision; it is then
          converted.

    Raises:
      UserError: another model's state, in another precision, or one that is not finite.
    """
    if own.steps():
        task = phases.before(own.newest()).task
        check_same_precision(
            f"run_dir={run_dir}", policy_of(own.meta()), task.model.policy
        )
        found = restore_own(own, task)
        another = (
            f"start another run from an earlier checkpoint: resume={run_dir}"
            " resume.step=STEP run_dir=NEW"
        )
        return check_finite(
            found, f"checkpoint {found.step} of run_dir={run_dir}", another
        )
    if source in ("auto", "none"):
        return check_finite(
            Restored(0, first(), {}),
            "the initial state",
            "choose other weights in init_from",
        )
    found = restore_other(source, phases, step=step, convert=convert)
    return check_finite(
        found,
        f"checkpoint {found.step} of resume={source}",
        "choose an earlier one: resume.step=STEP",
    )


def check_finite(found: Restored, where: str, advice: str) -> Restored:
    """Refuse a state with an array of weights or moments that is not finite; `where` it
    is, and what to do instead.
    """
    name = first_nonfinite(found.state)
    if name is not None:
        raise UserError(f"{where}: {name} is not finite; {advice}")
    return found


def restore_other(
    source: str, phases: Phases, *, step: int | None, convert: bool
) -> Restored:
    """Restore another run's state, for this run's task; arguments and errors as of
    `starting_point`.
    """
    with Checkpointer.reading(Path(source) / "checkpoints") as theirs:
        meta = theirs.meta(step)
        task = phases.before(theirs.newest() if step is None else step).task
        check_same_model(f"resume={source}", meta["model"], task.model.spec)
        policy, trained, ours = (
            policy_of(meta),
            meta["config"]["optimizer"]["name"],
            task.optimizer_name,
        )
        if trained != ours:
            raise UserError(
                f"resume={source} was trained with optimizer={trained}, whose state is"
                f" not that of {ours}; set optimizer={trained}, or take its weights"
                f" alone: init_from={source}"
            )
        check_same_trainable(source, meta, task)
        if task.diloco is None:
            check_no_replicas(f"resume={source}", meta)
        if not convert:
            check_same_precision(
                f"resume={source}",
                policy,
                task.model.policy,
                "resume.convert=true converts it",
            )
        like = task.in_precision(policy)
        found = (
            theirs.restore(abstract_state(like), step)
            if task.diloco is None
            else restored_as(theirs, like, step)
        )
    state = (
        found.state
        if policy == task.model.policy
        else convert_state(task, found.state, policy, phases.seed)
    )
    form = {
        "precision": dataclasses.asdict(task.model.policy),
        "trainable": list(task.trainable),
    }
    return Restored(
        found.step,
        state,
        {k: v for k, v in found.meta.items() if k not in ("tracker_id", "log")} | form,
    )


def restore_own(own: Checkpointer, task: TrainTask) -> Restored:
    """The newest state of a run that goes on, perhaps with another number of replicas;
    see `restored_as`.
    """
    if task.diloco is None:
        check_no_replicas("the checkpoint", own.meta())
        return own.restore(lambda meta: abstract_state(task_of(meta, task)))
    return restored_as(own, task)


def restored_as(
    checkpointer: Checkpointer, task: TrainTask, step: int | None = None
) -> Restored:
    """Restore a state for a task with replicas: of a run with as many, another number
    of them, or none.

    What was trained without replicas all of them go on from: weights, moments, steps.
    `step`: None: the newest.
    """
    assert task.diloco is not None
    diloco = task.diloco

    def as_saved(meta: Mapping[str, Any]) -> TrainState:
        before = replicas_in(meta, diloco)
        if is_like(before, diloco):
            return abstract_state(task)
        if before is None:
            return abstract_state(task._replace(diloco=None))
        first = Mesh(
            task.mesh.devices[:1, :1, :1, :1],
            task.mesh.axis_names,
            axis_types=task.mesh.axis_types,
        )
        then = task._replace(diloco=before, mesh=first)
        # their number need not be one that the devices divide
        everywhere = replicated(task.mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            abstract_state(then),
        )

    # which may be one before the newest, with other replicas
    found = checkpointer.restore(as_saved, step)
    before = replicas_in(found.meta, diloco)
    if is_like(before, diloco):
        return found
    change = task.with_replicas if before is None else task.with_replicas_of
    placed = jax.tree.map(lambda x: x.sharding, abstract_state(task))
    return found._replace(state=jax.jit(change, out_shardings=placed)(found.state))


def replicas_in(
    meta: Mapping[str, Any], diloco: DiLoCoSettings
) -> DiLoCoSettings | None:
    """What of `diloco` decides the form of a state, as a checkpoint has it; None: it
    was trained without replicas.
    """
    saved = meta["config"].get("diloco", {})
    count = saved.get("replicas")
    if count is None:
        return None
    feedback = saved["error_feedback"] and saved["outer_grad"] != "fp32"
    return diloco._replace(
        replicas=count,
        participants=count,
        momentum=saved["outer_momentum"],
        feedback=feedback,
    )


def is_like(before: DiLoCoSettings | None, now: DiLoCoSettings) -> bool:
    """Return whether states of both have one form."""
    return before is not None and (
        (before.replicas, before.feedback, before.momentum > 0)
        == (now.replicas, now.feedback, now.momentum > 0)
    )


def check_no_replicas(source: str, meta: Mapping[str, Any]) -> None:
    """Refuse a state of replicas for a run without them."""
    count = meta["config"].get("diloco", {}).get("replicas")
    if count is not None:
        raise UserError(
            f"{source} was trained with diloco.replicas={count} replicas, each with its"
            " own optimiser, for which a run without replicas has no place; set"
            " parallel=diloco diloco.replicas=1, or take its weights alone,"
            " init_from=RUN"
        )


def check_same_precision(
    source: str, theirs: Policy, ours: Policy, otherwise: str = ""
) -> None:
    """Refuse a state that was trained in another precision."""
    before, now = dataclasses.asdict(theirs), dataclasses.asdict(ours)
    different = [
        f"precision.{name}={before[name]} (now {now[name]})"
        for name in now
        if before[name] != now[name]
    ]
    if different:
        conversion = "there, resume=RUN resume.convert=true converts its state"
        raise UserError(
            f"{source} was trained with {', '.join(different)}: not the same run;"
            " choose its precision, or a run_dir of its own;"
            f" {otherwise or conversion}"
        )


def check_same_trainable(run: str, meta: Mapping[str, Any], task: TrainTask) -> None:
    """Refuse the state of another run that has moments of other parameters."""
    before = trainable_of(meta)
    if task._replace(trainable=before).trained_roles != task.trained_roles:
        theirs, ours = (
            f"train.trainable=[{','.join(names)}]" for names in (before, task.trainable)
        )
        raise UserError(
            f"resume={run} was trained with {theirs}, this is {ours}: its optimiser has"
            f" moments of other parameters; set {theirs}, or take the weights alone:"
            f" init_from={run}"
        )


def restore_logical(checkpointer: Checkpointer, like: Params) -> Params:
    """FP32 parameters of the newest checkpoint, whatever they were stored as, placed as
    `like`.
    """
    target = as_saved({"params": like}, checkpointer.described())
    found = checkpointer.restore(target, partial=True)
    name = first_nonfinite_leaf(found.state)
    if name is not None:
        raise UserError(
            f"checkpoint {found.step} in {checkpointer.directory}: {name} is not"
            " finite; choose another run"
        )
    return weights.wide(found.state["params"])


def initial_weights(
    source: Path, spec: Spec, tokenizer: Tokenizer, like: Params
) -> Params:
    """Parameters from a run, a Hugging Face directory or a safetensors file, placed and
    typed as `like`.

    `tokenizer` is that of the data, whose ids the weights must know.
    """
    named = f"init_from={source}"
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            meta = checkpointer.meta()
            other = other_tokenizer_of_run(source, meta, tokenizer)
            check_same_model(named, meta["model"], spec, FROM_INIT, other)
            return restore_logical(checkpointer, like)
    found, params = huggingface.load(source, spec)
    check_same_model(
        named,
        architecture(found),
        spec,
        FROM_INIT,
        other_tokenizer_beside(source, found, tokenizer),
    )
    if spec.scan_layers:
        params = spec.family().stack_layers(params)
    return jax.tree.map(
        lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding),
        params,
        like,
    )


def other_tokenizer_of_run(
    run_dir: Path, meta: Mapping[str, Any], ours: Tokenizer
) -> list[str]:
    """What to say and to do where a run's tokenizer is not that of the data; empty
    where it is.
    """
    theirs = (
        meta.get("tokenizer_fingerprint")
        or load_saved(meta["tokenizer"], run_dir).fingerprint
    )
    if theirs == ours.fingerprint:
        return []
    file = (
        "byte" if meta["tokenizer"] == ByteTokenizer.name else vocabulary_file(run_dir)
    )
    what = (
        f"was trained with tokenizer {meta['tokenizer']} of"
        f" {meta['model']['vocab_size']:,} ids"
    )
    return [
        f"{what} (the data's is {ours.name}, {ours.vocab_size:,} ids)",
        f"set data.tokenizer={file}{SWAP}",
    ]


def other_tokenizer_beside(source: Path, spec: Spec, ours: Tokenizer) -> list[str]:
    """What to say and to do where weights are for other ids than those of the data;
    empty where that is not seen.

    Without a tokenizer beside them their vocabulary tells: at most a hundredth of its
    rows may be without an id.
    """
    directory = huggingface.directory_of(source)
    theirs = ids_beside(directory)
    if theirs is not None:
        found = first_difference(theirs, ours)
        end = (
            f"set data.tokenizer={directory}, the data's is {ours.name} of"
            f" {ours.vocab_size:,} ids{SWAP}"
        )
        return [] if found is None else [f"has another tokenizer ({found})", end]
    if 0.99 * spec.vocab_size <= ours.vocab_size <= spec.vocab_size:
        return []
    what = (
        f"has {spec.vocab_size:,} ids (the data {ours.vocab_size:,}): another tokenizer"
    )
    return [what, f"set data.tokenizer to theirs, the data's is {ours.name}"]


def describe_init(source: Path, ours: Tokenizer, spec: Spec, params: Params) -> str:
    """A line about the weights that a run starts from: whose they are, how many, and
    whether their ids are the data's.

    Args:
      source: of the weights.
      ours: tokenizer of the data, which has not been refused.
      spec: of the model.
      params: the weights, ScaledArrays among them.
    """
    arrays = tree.leaves(params)
    size = f"{len(arrays):,} tensors, {sum(x.size for x in arrays):,} parameters"
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            step = checkpointer.newest()
        return (
            f"weights from {source} after its step {step:,}: {size}; its tokenizer,"
            f" {ours.name}, is that of the data"
        )
    family = (huggingface.family_at(source) or spec.family()).name
    what = f"weights from {source} (Hugging Face, {family}): {size}; "
    if ids_beside(huggingface.directory_of(source)) is not None:
        return f"{what}the tokenizer beside them is that of the data, {ours.name}"
    return (
        f"{what}there is no tokenizer beside them, so that nobody checked whether their"
        f" ids are those of data.tokenizer={ours.name}"
    )


def with_origin(found: Restored, source: str) -> Restored:
    """What a fork starts from; its meta says so, then and in all of its checkpoints:
    `forked`, a run and a step.
    """
    return found._replace(
        meta=found.meta | {"forked": {"run": source, "step": found.step}}
    )


def is_fork(found: Restored) -> bool:
    """Return whether a run begins here as a fork: one that goes on has come further
    than where it was forked.
    """
    forked = found.meta.get("forked")
    return forked is not None and forked["step"] == found.step


def describe_origin(meta: Mapping[str, Any]) -> str:
    """`RUN after step N` of a fork; empty for any other run. `meta`: as the run was
    restored with.
    """
    forked = meta.get("forked")
    return f"{forked['run']} after step {forked['step']:,}" if forked else ""


def check_same_run(found: Restored, steps: int, data: str, *, fork: bool) -> None:
    """Refuse to go on where the same run could not: other data, or fewer steps in all
    than were taken already.

    A `fork`, in a directory of its own, takes a step at least: it would be left without
    a checkpoint.
    """
    if steps < found.step + fork:
        raise UserError(
            f"train.steps={steps}, but the checkpoint has {found.step}; valid:"
            f" {found.step + fork} or more"
        )
    before = found.meta.get("data") if found.step else data
    if before != data:
        raise UserError(
            f"the checkpoint was trained on data {before}, this is {data}: not the same"
            " run; bring back the data, or start a new run with init_from"
        )
