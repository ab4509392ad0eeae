"""A Ray cluster of several nodes on this machine, each in a process group of its own.

``ray`` is the program of ``.venv-ray`` (``make install-ray``), of the environment variable
``AFFIDAVIT_RAY``, or of the path. Nodes need nothing of Affidavit: jobs name their interpreter.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.free_ports import free_port
from tests.support.polling import TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
STORE = str(80 * 1024 * 1024)
"""Bytes of a node's object store, the least that Ray accepts."""

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "240",
}
"""A node of a machine that others use starts slowly. Ray would ask for the token that ``ray.init``
leaves in the home folder."""


def program() -> str | None:
    """The path of ``ray``, if there is one."""
    own = ROOT / ".venv-ray" / "bin" / "ray"
    named = os.environ.get("AFFIDAVIT_RAY") or (str(own) if own.exists() else None)
    return named or shutil.which("ray")


@dataclass
class RayCluster:
    """Nodes of one processor each; the first one is the head."""

    ray: str
    environment: Mapping[str, str]
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    port: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where drivers connect to."""
        return f"127.0.0.1:{self.port}"

    def start_head(self) -> subprocess.Popen[bytes]:
        """Start the head, and wait until its Jobs API answers."""
        head = self._start(
            *("--head", f"--port={self.port}", f"--temp-dir={self.folder}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}"),
            f"--ray-client-server-port={free_port()}",
        )
        self._wait(1)
        return head

    def start_node(self) -> subprocess.Popen[bytes]:
        """Start another node, and wait until the head knows it."""
        node = self._start(f"--address={self.address}")
        self._wait(len([node for node in self.nodes if node.poll() is None]))
        return node

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End a node with all that runs on it, as a power cut would."""
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait(TIMEOUT_SECONDS)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        with (Path(self.folder) / "log").open("ab") as log:
            node = subprocess.Popen(
                [
                    *(self.ray, "start", "--block", "--num-cpus=1", "--disable-usage-stats"),
                    *(f"--object-store-memory={STORE}", *options),
                    f"--dashboard-agent-listen-port={free_port()}",
                ],
                env={**os.environ, **self.environment, **VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # Its agents have fifteen seconds to start, however busy the machine is: it goes first,
        # where the kernel lets it.
        with suppress(OSError):
            Path(f"/proc/{node.pid}/autogroup").write_text("-10")
        self.nodes.append(node)
        return node

    def _wait(self, nodes: int, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        url = f"http://127.0.0.1:{self.dashboard}/api/v0/nodes"
        while time.monotonic() < end:
            with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
                result = httpx.get(url, timeout=5).json()["data"]["result"]["result"]
                if sum(node["state"] == "ALIVE" for node in result) >= nodes:
                    return
            time.sleep(0.2)
        raise TimeoutError((Path(self.folder) / "log").read_text()[-2000:])


@contextmanager
def ray_cluster(ray: str, nodes: int = 2, **environment: str) -> Iterator[RayCluster]:
    """A cluster of so many nodes, whose jobs inherit the environment."""
    cluster = RayCluster(ray, environment)
    try:
        cluster.start_head()
        for _ in range(nodes - 1):
            cluster.start_node()
        yield cluster
    finally:
        for node in cluster.nodes:
            cluster.kill(node)
        shutil.rmtree(cluster.folder, ignore_errors=True)
