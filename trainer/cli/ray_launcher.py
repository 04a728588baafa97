"""Run a training on a Ray cluster: `launcher=ray`.

Ray Train places the workers and watches them. When one is lost, it starts all of them
again, as many as the cluster then has room for. It does no more than that. Each worker
is the trainer, joined to the others by `trainer.parallel.processes`; Ray's JAX backend,
which would start `jax.distributed` itself, is not used. A restart gets nothing from the
start before it but the checkpoints in the run directory.

No other module of the trainer imports Ray. It is imported only for `launcher=ray`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from trainer.cli.train import LOST_PROCESS
from trainer.config.combinations import with_workers
from trainer.config.fields import from_tree, to_tree
from trainer.config.schema import Config, Launcher
from trainer.errors import UserError, complain, exit_at_once
from trainer.text import how_to_install, plural, show

# The start of a line of Ray's log, or of a message of Ray about a lost process.
RAY_LINE = (
    r"(?:\[\d{4}-\d\d-\d\d |\s*\[state-dump\]|Raylet is terminated"
    r"|The node with node id|A worker died or was killed)"
)
# Ray reads these when it is imported, or when it starts workers.
RAY_VARIABLES = {
    # Otherwise Ray sends reports about the cluster to its makers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds that Ray waits for a worker group of the old size before it starts a
    # smaller one, because it may still count a lost machine. Ray's default is 60.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # Print the trainer's lines unchanged: without a worker prefix, and without
    # deduplication. Drop Ray's own lines; `WorkerCallbacks` reports what they say.
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_DEDUP_LOGS_ALLOW_REGEX": f"^(?!{RAY_LINE})",
    "RAY_DEDUP_LOGS_SKIP_REGEX": f"^{RAY_LINE}",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers work in the directory of the command.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
for _name, _value in RAY_VARIABLES.items():
    # `setdefault`: a variable that the user has set wins.
    os.environ.setdefault(_name, _value)

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.train import (
        ControllerError,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        WorkerGroupError,
    )
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.execution.callback import (
        ControllerCallback,
        WorkerGroupCallback,
    )
    from ray.train.v2._internal.execution.controller.state import ReschedulingState
    from ray.train.v2._internal.execution.scaling_policy import (
        autoscaling_coordinator_client,
    )
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    # Paths below `_internal` change between versions: with another Ray the command ends
    # here in a line, and not when a worker is lost.
    raise UserError(
        f"launcher=ray needs ray[train] 2.60 ({missing}); {how_to_install('ray')}, on"
        " all machines"
    ) from missing

# Seconds after which Ray frees what a killed command requested, for the next command.
# Ray's default is 180; a running command renews its request every 20 s.
autoscaling_coordinator_client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S = 40
# Prefixes of the environment variables that workers get from the command. No others
# are passed, because Ray logs them, and they may be secrets. Workers have all other
# variables from their own machine.
PASSED_PREFIXES = ("JAX_", "XLA_", "PYTHONPATH")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESUME = "to resume: run the same command again"


class WorkerJob(NamedTuple):
    """The training, as every worker gets it.

    Attributes:
      config: the configuration as nested plain values.
      overrides: the user's overrides, for the report.
      fixed: keys and groups that must equal those of the run to resume, see
        RunDir.check.
      folder: the directory of the command.
      stop_actor: handle of a `StopActor`.
    """

    config: Mapping[str, Any]
    overrides: Sequence[str]
    fixed: Collection[str]
    folder: str
    stop_actor: Any


class StopActor:
    """A Ray actor that stops the workers after a step, with a checkpoint.

    Rank 0 receives the signal; the training loop makes all ranks agree.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._training = False
        # Methods of an actor that are `async` run in one event loop, so they wait
        # without threads.
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()

    async def set_training(self, now: bool) -> None:
        """Note whether workers train now."""
        self._training = now

    async def send(self, number: int) -> bool:
        """Send a signal's number to these workers and all later ones.

        Return whether workers train, which then will stop.
        """
        self._signal = number
        self._wake.set()
        return self._training

    async def interrupt(self) -> None:
        """Stop these workers for a resize, and wait until they have stopped."""
        self._stopped.clear()
        # Wake the workers that wait now, but not later ones, unless a signal came.
        self._wake.set()
        if not self._signal:
            self._wake.clear()
        await self._stopped.wait()

    async def receive(self) -> int:
        """Wait until workers must stop. Return the signal, or SIGTERM for a resize."""
        await self._wake.wait()
        return self._signal or signal.SIGTERM

    async def stopped(self) -> None:
        """Note that the workers have stopped, or have ended."""
        self._stopped.set()


class Trainer(DataParallelTrainer):
    """Ray's trainer without an actor that would outlive a killed command.

    That actor frees the workers' reservations, and needs package ray[default]. Ray
    itself frees the reservations at the end of a job.
    """

    def _create_default_callbacks(self) -> list[Any]:
        return [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, PlacementGroupCleanerCallback)
        ]


class WorkerCallbacks(ControllerCallback, WorkerGroupCallback):
    """Callbacks that print what happens to workers.

    Ray calls them in its controller, a process other than the command.

    Args:
      stop_actor: handle of the `StopActor`.
      stop_seconds: seconds that workers may take to stop; None: no limit.
    """

    def __init__(self, stop_actor: Any, stop_seconds: float | None) -> None:
        self.stop_actor = stop_actor
        self.stop_seconds = stop_seconds
        self.is_training = False
        self.requested = 0
        self.reported_shortage = False
        self.locations: list[str] = []

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Print the machine and the process of each worker."""
        processes = [worker.metadata for worker in worker_group.get_workers()]
        self.locations = [f"{p.hostname}, process {p.pid}" for p in processes]
        ranks = enumerate(self.locations)
        show(f"workers: {'; '.join(f'{rank} on {where}' for rank, where in ranks)}")
        self.requested = 0
        self.reported_shortage = False

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Note that workers train."""
        self._set_training(True)

    def _set_training(self, now: bool) -> None:
        self.is_training = now
        ray.get(self.stop_actor.set_training.remote(now))

    def after_controller_state_update(
        self, previous_state: Any, current_state: Any
    ) -> None:
        """Print once that the cluster lacks resources, if Ray will retry."""
        if isinstance(current_state, ReschedulingState) and not self.reported_shortage:
            self.reported_shortage = True
            show(
                "the cluster has no free resources for"
                f" {plural(self.requested, 'worker')} (a lost machine may still be"
                " counted); retrying. To add a machine, run `ray start"
                " --address=HOST:6379` there"
            )

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Print which workers have failed.

        Raises:
          UserError: a worker raised it, and all processes live. After a restart, the
              worker would raise it again.
        """
        errors = worker_group_status.errors
        refusals = [error for error in errors.values() if isinstance(error, UserError)]
        # If a process was lost, a UserError of another may be its consequence.
        if refusals and not any(map(is_lost, errors.values())):
            raise refusals[0]
        if errors and self.is_training:
            self._set_training(False)
            ranks = ", ".join(map(str, sorted(errors)))
            lowest = min(errors)
            reason = f"{self.locations[lowest]}: {describe(errors[lowest])}"
            show(
                f"worker {ranks} of {len(worker_group_status.worker_statuses)} has"
                f" failed ({reason}): starting again with the workers that the cluster"
                " has, from the newest checkpoint, or from the beginning if there is"
                " none"
            )

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Print how many workers start; let those that train save a checkpoint."""
        count = resize_decision.num_workers
        if self.is_training:
            self._set_training(False)
            show(
                f"the cluster has room for {plural(count, 'worker')}: saving a"
                " checkpoint, and starting again with them"
            )
            # Workers that do not stop in time are ended by Ray, and repeat steps.
            with contextlib.suppress(GetTimeoutError):
                ray.get(self.stop_actor.interrupt.remote(), timeout=self.stop_seconds)
        if count != self.requested:
            self.requested = count
            show(f"asking the cluster for {plural(count, 'worker')}")


def is_lost(error: Exception) -> bool:
    """Return whether Ray raised the error, because a worker does not answer."""
    return type(error).__module__.startswith("ray.")


def describe(error: Exception) -> str:
    """Describe a worker's error in a line."""
    if is_lost(error):
        return "its process or its machine has ended"
    if LOST_PROCESS.search(str(error)):
        return "it lost the connection to another worker"
    return (str(error).splitlines() or [type(error).__name__])[0]


def launch(
    config: Config, overrides: Sequence[str] = (), fixed: Collection[str] = ()
) -> int:
    """Train on the cluster that this machine belongs to; return the exit code.

    Args:
      config: the checked configuration.
      overrides: the user's overrides, for the report.
      fixed: keys and groups that must equal those of the run to resume, see
        RunDir.check.

    Raises:
      UserError: there is no cluster, or a worker raised it.
    """
    connect()
    with tempfile.TemporaryDirectory() as storage:
        stop_actor = start_stop_actor()
        job = WorkerJob(
            to_tree(config), list(overrides), list(fixed), os.getcwd(), stop_actor
        )
        trainer = make_trainer(config, job, storage)
        assert config.launcher.workers is not None
        min_workers, max_workers = config.launcher.workers
        show(
            f"looking for room for {min_workers} to {max_workers} workers on the Ray"
            " cluster; `ray status` says what it has"
        )
        try:
            code = fit(trainer, stop_actor)
        # Frees the reserved machines, also after an error.
        finally:
            ray.shutdown()
    if code:
        show(RESUME)
    return code


def start_stop_actor() -> Any:
    """Start a `StopActor`, and return its handle."""
    # Pinned to the command's machine, so that losing another does not end it.
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    # No CPU of its own: it waits, and must not take a worker's.
    actor_class = ray.remote(num_cpus=0)(StopActor)
    return actor_class.options(scheduling_strategy=here).remote()


def make_trainer(config: Config, job: WorkerJob, storage: str) -> Trainer:
    """Return Ray's trainer of a job.

    `storage`: a directory, which stays empty because workers report nothing.
    """
    callbacks = WorkerCallbacks(job.stop_actor, config.watchdog.stop_seconds or None)
    return Trainer(
        work,
        train_loop_config={"job": job},
        scaling_config=scaling(config.launcher),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=config.launcher.restarts),
            callbacks=[callbacks],
            logging_config=LoggingConfig("CRITICAL"),
        ),
    )


def connect() -> None:
    """Connect to the cluster of this machine. Raises UserError if there is none."""
    check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        # "auto" only joins a cluster; else Ray would start one here if there is none.
        ray.init(
            "auto", logging_level="ERROR", runtime_env={"env_vars": passed_variables()}
        )
    except ConnectionError as error:
        raise UserError(
            "launcher=ray found no Ray cluster on this machine; start one by `ray start"
            " --head --disable-usage-stats`, and `ray start --address=HOST:6379` on the"
            " other machines"
        ) from error


def check_address(address: str) -> None:
    """Raise UserError if nobody answers at HOST:PORT. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start it,"
            " or unset RAY_ADDRESS for that of this machine"
        ) from error


def passed_variables() -> dict[str, str]:
    """Return the command's environment variables that its workers get."""
    return {k: v for k, v in os.environ.items() if k.startswith(PASSED_PREFIXES)}


def scaling(launcher: Launcher) -> ScalingConfig:
    """Return how many workers Ray starts, and the resources of each."""
    assert launcher.workers is not None
    min_workers, max_workers = launcher.workers
    # For a fixed number, unlike a range, Ray holds no machines after a killed command.
    count = max_workers if min_workers == max_workers else launcher.workers
    gpus = launcher.worker_gpus
    if gpus is None:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
    resources = {"CPU": launcher.worker_cpus or 1} | ({"GPU": gpus} if gpus else {})
    return ScalingConfig(
        num_workers=count,
        use_gpu=gpus > 0,
        resources_per_worker=resources,
        elastic_resize_monitor_interval_s=float(launcher.resize_seconds or 0),
    )


def fit(trainer: Trainer, stop_actor: Any) -> int:
    """Train until the end, or until workers have stopped after a signal.

    Raises:
      UserError: a worker raised it.
    """
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        # A list, because a handler returns nothing.
        signals.append(number)
        if len(signals) > 1:
            end_at_once(number)

    # In the main thread, Ray would end the workers at the first Ctrl-C.
    with signal_handlers(handle), ThreadPoolExecutor(1) as pool:
        running: Future[Any] = pool.submit(trainer.fit)
        sent = 0
        # The handler only notes a signal: this loop acts on it, and may wait for Ray.
        while not wait([running], timeout=0.5).done:
            if signals and not sent:
                sent = signals[0]
                name = signal.Signals(sent).name
                if not ray.get(stop_actor.send.remote(sent)):
                    show(f"{name}: no worker is training, so there is nothing to save")
                    end_at_once(sent)
                show(
                    f"{name}: stopping all workers after a step, or after what they"
                    " compile, and saving a checkpoint; a second signal ends them at"
                    " once"
                )
        return exit_code(running)


def end_at_once(number: int) -> NoReturn:
    """End the command after a signal. Ray then ends its workers."""
    show(RESUME)
    exit_at_once(128 + number)


@contextlib.contextmanager
def signal_handlers(handle: Any) -> Iterator[None]:
    """Handle `SIGNALS` by a function while the context is open."""
    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code(done: Future[Any]) -> int:
    """Return the exit code of a training that has ended.

    Raises:
      UserError: a worker raised it.
    """
    try:
        code: int = done.result().return_value
    except WorkerGroupError as error:
        complain(
            f"gave up: more workers were lost than launcher.restarts; the last one:"
            f" {describe(next(iter(error.worker_failures.values())))}"
        )
        return 1
    except ControllerError as error:
        if isinstance(error.controller_failure, UserError):
            raise error.controller_failure from None
        raise
    return code


def work(settings: Mapping[str, Any]) -> int:
    """Train as one worker of several; return the exit code. Ray calls it in each."""
    # JAX is imported in workers only: in the command it would take a GPU from them.
    import jax

    from trainer.assembly.hooks import Hooks
    from trainer.assembly.training import run
    from trainer.parallel.processes import PROCESS_VARIABLES

    job: WorkerJob = settings["job"]
    # In workers, Ray prints INFO of all loggers, JAX's among them.
    logging.getLogger("jax").setLevel(logging.WARNING)
    change_directory(job.folder)
    context = ray.train.get_context()
    count, rank = context.get_world_size(), context.get_world_rank()
    # Rank 0 chooses: it is the coordinator, and its port must be free on its machine.
    values = (broadcast_from_rank_zero(free_address()), str(count), str(rank))
    os.environ |= dict(zip(PROCESS_VARIABLES, values, strict=True))
    config = with_workers(from_tree(Config, job.config), count)
    received: list[int] = []
    if rank == 0:
        # A thread of its own: the call returns only when a signal comes. A daemon, so
        # that it does not keep the worker.
        threading.Thread(
            target=receive_signal, args=(job.stop_actor, received), daemon=True
        ).start()
    hooks = Hooks(remote_signal=lambda: received[0] if received else 0)
    try:
        code, _ = run(config, job.overrides, hooks, job.fixed)
    except UserError:
        raise
    except Exception as error:
        if not LOST_PROCESS.search(str(error)):
            traceback.print_exc()  # Ray's report shortens it.
        raise
    finally:
        if rank == 0:
            # Also after an error: `interrupt` would wait for a stop that never comes.
            ray.get(job.stop_actor.stopped.remote())
    # Not in `finally`: after an error it would wait for processes that may be gone.
    jax.distributed.shutdown()
    return code


def receive_signal(stop_actor: Any, received: list[int]) -> None:
    """Wait for a signal to the command, and append its number to `received`."""
    with contextlib.suppress(RayError):  # The command may have ended.
        received.append(ray.get(stop_actor.receive.remote()))


def change_directory(folder: str) -> None:
    """Enter the command's directory, where relative paths mean the same."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"{folder}, where the command was called, cannot be entered on"
            f" {socket.gethostname()}: {error.strerror}; call it in a directory that"
            " all machines see"
        ) from error


def free_address() -> str:
    """Return an address of this machine with a free port."""
    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        # Port 0: the system chooses a free one. It is closed again, so another program
        # could take it before JAX does.
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
