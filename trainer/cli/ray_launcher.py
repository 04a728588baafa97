"""Run a training on a Ray cluster: `launcher=ray`.

Ray Train places the workers, watches them, and starts all of them again when one is
lost, with as many as the cluster then has. It does no more than that. Each worker is
the trainer, joined to the others by `trainer.parallel.processes`; Ray's JAX backend,
which would start `jax.distributed` itself, is not used. The checkpoints of the run
directory are all that one start leaves to the next.

Nothing else knows of Ray, and this module is imported only for `launcher=ray`.
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
from typing import Any, NamedTuple

from trainer.cli.train import LOST_PROCESS
from trainer.config.combinations import with_workers
from trainer.config.fields import from_tree, to_tree
from trainer.config.schema import Config, Launcher
from trainer.errors import UserError, complain
from trainer.text import override, show

# The beginnings of the lines of Ray's log, and of its messages about lost processes.
RAY_LINE = (
    r"(?:\[\d{4}-\d\d-\d\d |\s*\[state-dump\]|Raylet is terminated"
    r"|The node with node id|A worker died or was killed)"
)
# Ray reads these when it is imported, or when it starts workers.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds that Ray waits for a worker group of the old size before it starts a
    # smaller one: it may still count a lost machine. Its default is 60.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # Print the trainer's lines unchanged: without a worker prefix, and without
    # deduplication. Drop Ray's own lines; `Events` reports what they say.
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_DEDUP_LOGS_ALLOW_REGEX": f"^(?!{RAY_LINE})",
    "RAY_DEDUP_LOGS_SKIP_REGEX": f"^{RAY_LINE}",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # No actor that polls for preemption notices.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers work in the directory of the command.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
for _name, _value in SETTINGS.items():
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
    raise UserError(
        f"launcher=ray needs ray[train] 2.60 ({missing}); make extra-ray, or pip"
        " install 'scalify-trainer[ray]', on all machines"
    ) from missing

# Seconds until Ray frees the machines of a killed command for its next call. Ray's
# default is 180; a running command renews its request every 20 s.
autoscaling_coordinator_client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S = 40
# Beginnings of the environment variables that the workers get from the command. Others
# may be secrets, which Ray would log; workers have those of their node.
PASSED_ON = ("JAX_", "XLA_", "PYTHONPATH")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WorkerJob(NamedTuple):
    """The training, as every worker gets it.

    Attributes:
      config: nested plain values.
      overrides: what the user set, for the report.
      fixed: keys and groups that a run in this directory must have as they are here.
      folder: the directory of the command.
      stop: handle of a `StopRequest`.
    """

    config: Mapping[str, Any]
    overrides: Sequence[str]
    fixed: Collection[str]
    folder: str
    stop: Any


class StopRequest:
    """Stops the workers after a step, with a checkpoint; a Ray actor.

    Rank 0 receives the signal; the training loop makes all ranks agree.
    """

    def __init__(self) -> None:
        self._number = 0
        self._wake, self._stopped = asyncio.Event(), asyncio.Event()

    async def send(self, number: int) -> None:
        """Send the number of a signal, for these workers and all later ones."""
        self._number = number
        self._wake.set()

    async def interrupt(self) -> None:
        """Stop these workers, and wait until they have."""
        self._stopped.clear()
        # Wake those that wait now; later workers wait for a new event, unless a signal
        # came.
        self._wake.set()
        if not self._number:
            self._wake.clear()
        await self._stopped.wait()

    async def receive(self) -> int:
        """Wait for the number."""
        await self._wake.wait()
        return self._number or signal.SIGTERM

    async def stopped(self) -> None:
        """Tell that the workers have stopped, or have ended."""
        self._stopped.set()


class Trainer(DataParallelTrainer):
    """Ray's trainer without an actor that would outlive a killed command.

    It frees what workers had reserved, which Ray itself does at the end of a job, and
    needs package ray[default] for that.
    """

    def _create_default_callbacks(self) -> list[Any]:
        return [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, PlacementGroupCleanerCallback)
        ]


class Events(ControllerCallback, WorkerGroupCallback):
    """Prints what happens to workers; runs in Ray's controller, beside the command.

    Args:
      stop: handle of the `StopRequest`.
      seconds: that workers may take to stop; None: no limit.
    """

    def __init__(self, stop: Any, seconds: float | None) -> None:
        self.stop, self.seconds = stop, seconds
        self.at_work = False
        self.places: list[str] = []

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Print the machine and the process of each worker."""
        processes = [worker.metadata for worker in worker_group.get_workers()]
        self.places = [f"{p.hostname}, process {p.pid}" for p in processes]
        workers = "; ".join(f"{i} on {place}" for i, place in enumerate(self.places))
        show(f"workers: {workers}")

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Note that workers train."""
        self.at_work = True

    def after_controller_state_update(
        self, previous_state: Any, current_state: Any
    ) -> None:
        """Print that workers did not start, and are asked for again."""
        if isinstance(current_state, ReschedulingState):
            show(
                "the cluster has not started them, perhaps because it still counts a"
                " lost machine"
            )

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Print which workers have failed.

        Raises:
          UserError: that of a worker, if all answer: it would come again.
        """
        errors = worker_group_status.errors
        refusals = [error for error in errors.values() if isinstance(error, UserError)]
        if refusals and not any(map(is_gone, errors.values())):
            raise refusals[0]
        if errors and self.at_work:
            self.at_work = False
            ranks, first = ", ".join(str(rank) for rank in sorted(errors)), min(errors)
            show(
                f"worker {ranks} of {len(worker_group_status.worker_statuses)} has"
                f" failed ({self.places[first]}: {describe(errors[first])}): starting"
                " again from the newest checkpoint, with the workers that the cluster"
                " has"
            )

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Print how many workers start; let those that train save a checkpoint."""
        count = resize_decision.num_workers
        if self.at_work:
            self.at_work = False
            show(
                f"the cluster has room for {count} workers: saving a checkpoint, and"
                " starting again with them"
            )
            with contextlib.suppress(GetTimeoutError):
                ray.get(self.stop.interrupt.remote(), timeout=self.seconds)
        show(f"asking the cluster for {count} worker{'s' * (count != 1)}")


def is_gone(error: Exception) -> bool:
    """Return whether Ray raised the error, for a worker that does not answer."""
    return type(error).__module__.startswith("ray.")


def describe(error: Exception) -> str:
    """Return a worker's error in a line."""
    if is_gone(error):
        return "its process or its machine has ended"
    if LOST_PROCESS.search(str(error)):
        return "its connection to another worker is gone"
    return (str(error).splitlines() or [type(error).__name__])[0]


def launch(
    config: Config, overrides: Sequence[str] = (), fixed: Collection[str] = ()
) -> int:
    """Train on the cluster that this machine belongs to; return the exit code.

    Args:
      config: the checked configuration.
      overrides: what the user set, for the report.
      fixed: keys and groups that a run in this directory must have as they are here.

    Raises:
      UserError: there is no cluster; or a worker's.
    """
    connect()
    with tempfile.TemporaryDirectory() as storage:
        stop = ray.remote(num_cpus=0)(StopRequest).options(
            # It ends with the command, and not with another machine.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
        )
        stop = stop.remote()
        job = WorkerJob(
            to_tree(config), list(overrides), list(fixed), os.getcwd(), stop
        )
        trainer = Trainer(
            work,
            train_loop_config={"job": job},
            scaling_config=scaling(config.launcher),
            run_config=RunConfig(
                name="run",
                storage_path=storage,  # nothing is stored: workers report nothing
                failure_config=FailureConfig(max_failures=config.launcher.restarts),
                callbacks=[Events(stop, config.watchdog.stop_seconds or None)],
                logging_config=LoggingConfig("CRITICAL"),
            ),
        )
        least, _ = config.launcher.workers or ()
        show(
            f"waiting until the Ray cluster has room for {least} workers or more; `ray"
            " status` says what it has"
        )
        try:
            code = fit(trainer, stop)
        finally:
            ray.shutdown()
    if code:
        show(f"to resume: the same command with {override('run_dir', config.run_dir)}")
    return code


def connect() -> None:
    """Connect to the cluster of this machine. Raises UserError if there is none."""
    try:
        ray.init("auto", logging_level="ERROR", runtime_env={"env_vars": passed_on()})
    except ConnectionError as error:
        raise UserError(
            "launcher=ray found no Ray cluster on this machine; start one by `ray start"
            " --head --disable-usage-stats`, and `ray start --address=HOST:6379` on the"
            " other machines"
        ) from error


def passed_on() -> dict[str, str]:
    """Return the command's variables that its workers get."""
    return {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}


def scaling(launcher: Launcher) -> ScalingConfig:
    """Return how many workers Ray starts, and with what."""
    assert launcher.workers is not None
    least, most = launcher.workers
    gpus = launcher.worker_gpus
    if gpus is None:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
    resources = {"CPU": launcher.worker_cpus or 1} | ({"GPU": gpus} if gpus else {})
    return ScalingConfig(
        # With a number Ray keeps no machines for a command that was killed.
        num_workers=most if least == most else (least, most),
        use_gpu=gpus > 0,
        resources_per_worker=resources,
        elastic_resize_monitor_interval_s=float(launcher.resize_seconds or 0),
    )


def fit(trainer: Trainer, stop: Any) -> int:
    """Train until the end, or until workers have stopped after a signal.

    Raises:
      UserError: that of a worker.
    """
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)  # Ray ends the workers of a command that is gone

    # Ray would end the workers at the first Ctrl-C, if it saw the main thread.
    with handlers(handle), ThreadPoolExecutor(1) as pool:
        running: Future[Any] = pool.submit(trainer.fit)
        sent = 0
        while not wait([running], timeout=0.5).done:
            if signals and not sent:
                sent = signals[0]
                show(
                    f"{signal.Signals(sent).name}: stopping all workers after a step"
                    " and saving a checkpoint; a second signal ends them at once"
                )
                ray.get(stop.send.remote(sent))
        return exit_code(running)


@contextlib.contextmanager
def handlers(handle: Any) -> Iterator[None]:
    """Handle signals by a function while the context is open."""
    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code(done: Future[Any]) -> int:
    """Return the exit code of a training that has ended.

    Raises:
      UserError: that of a worker.
    """
    try:
        code: int = done.result().return_value
    except WorkerGroupError as error:
        complain(
            f"gave up after launcher.restarts lost workers; the last one:"
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
    # JAX is imported in workers alone: the command may not take a GPU from them.
    import jax

    from trainer.assembly.hooks import Hooks
    from trainer.assembly.run import run
    from trainer.parallel.processes import PROCESS_VARIABLES

    job: WorkerJob = settings["job"]
    logging.getLogger("jax").setLevel(logging.WARNING)  # Ray shows more of all loggers
    change_directory(job.folder)
    context = ray.train.get_context()
    count, rank = context.get_world_size(), context.get_world_rank()
    values = (broadcast_from_rank_zero(free_address()), str(count), str(rank))
    os.environ |= dict(zip(PROCESS_VARIABLES, values, strict=True))
    config = with_workers(from_tree(Config, job.config), count)
    received: list[int] = []
    if rank == 0:
        waiting = (job.stop, received)
        threading.Thread(target=receive_signal, args=waiting, daemon=True).start()
    hooks = Hooks(stop_requested=lambda: received[0] if received else 0)
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
            ray.get(job.stop.stopped.remote())
    jax.distributed.shutdown()
    return code


def receive_signal(stop: Any, received: list[int]) -> None:
    """Wait for a signal to the command, and append its number to `received`."""
    with contextlib.suppress(RayError):  # the command is gone
        received.append(ray.get(stop.receive.remote()))


def change_directory(folder: str) -> None:
    """Work in the directory of the command, where relative paths mean the same."""
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
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
