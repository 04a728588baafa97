"""A Ray cluster of several nodes on this machine, for tests and fault injection."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

# Before Ray is imported: nothing is sent home, and workers are not put behind others.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import psutil

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class Nodes:
    """Nodes, each with room for one worker, beside a head that has none.

    So a node can be killed without the command, which the head's machine runs.

    Args:
      count: number of nodes.
    """

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster  # a third of a second to import

        head = NODE | {"num_cpus": 0}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        """The address for RAY_ADDRESS."""
        return str(self._cluster.address)

    def add(self) -> None:
        """Start another node."""
        self.nodes.append(self._cluster.add_node(**NODE))

    def kill(self) -> None:
        """Kill the node that started last, by SIGKILL."""
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def workers(self) -> list[int]:
        """Return the processes of workers, those of the first node first."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self.nodes]
        return [
            child.pid
            for raylet in raylets
            for child in psutil.Process(raylet).children()
            if any("RayTrainWorker" in word for word in child.cmdline())
        ]

    def shutdown(self) -> None:
        """Kill all processes of the cluster."""
        self._cluster.shutdown()


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Nodes]:
    """Start a cluster, and kill all of it at the end."""
    # Ray's sockets and logs; the path of a socket must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    try:
        nodes = Nodes(count)
        try:
            yield nodes
        finally:
            nodes.shutdown()
    finally:
        del os.environ["RAY_TMPDIR"]
        shutil.rmtree(folder, ignore_errors=True)
