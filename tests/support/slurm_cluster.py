"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd, all by this user.

The programs come from Debian's packages (``tests.support.external_programs``). Cores and memory
are allocated as on a cluster; there are no GPUs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.external_programs import PATH
from tests.support.free_ports import free_port
from tests.support.polling import TIMEOUT_SECONDS, wait_until

RECIPE = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "worker.sbatch"
SECONDS = TIMEOUT_SECONDS
CONFIGURATION = """\
ClusterName=affidavit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Daemon(subprocess.Popen[bytes]):
    """A process that knows its program."""

    def __init__(self, program: str, *options: str, **more: Any) -> None:
        super().__init__([program, *options], **more)
        self.name = Path(program).name


@dataclass
class SlurmCluster:
    """The daemons; ``environment`` is what Slurm's commands need."""

    folder: Path = field(
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    )
    daemons: list[Daemon] = field(default_factory=list)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> None:
        """Start all three, and wait until the node is idle."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir(exist_ok=True)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            controller_port=free_port(),
            node_port=free_port(),
            folder=self.folder,
            user=subprocess.check_output(["id", "-un"], text=True).strip(),
        )
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        socket_option = f"--socket={self.folder}/munge.socket"
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}", socket_option),
            *(f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed"),
        )
        self.start_controller()
        self.start_node()
        wait_until(self._is_idle, SECONDS, often=0.1, said=(self.folder / "log").read_text)

    def start_controller(self) -> None:
        """Start slurmctld; jobs that an earlier one knew are read from its state."""
        self._daemon("slurmctld", "-D")

    def start_node(self) -> None:
        """Start slurmd."""
        self._daemon("slurmd", "-D")

    def kill(self, program: str) -> None:
        """End a daemon, but not its jobs, as SIGKILL does."""
        for daemon in [item for item in self.daemons if item.name == program]:
            daemon.kill()
            daemon.wait(TIMEOUT_SECONDS)
            self.daemons.remove(daemon)

    def run(self, *command: str) -> str:
        """What a command of Slurm prints; raises ``CalledProcessError``."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def stop(self) -> None:
        """End all daemons and their jobs."""
        if self.daemons:
            subprocess.run(
                ["scancel", "--full", "--signal=KILL", f"--user={os.geteuid()}"],
                env={**os.environ, **self.environment},
                check=False,
                capture_output=True,
                timeout=SECONDS,
            )
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _daemon(self, program: str, *options: str) -> None:
        found = shutil.which(program, path=PATH)
        if found is None:
            raise FileNotFoundError(
                f"there is no {program}: python -m tests.support.external_programs installs it"
            )
        with (self.folder / "log").open("ab") as log:
            daemon = Daemon(
                found,
                *options,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.daemons.append(daemon)

    def _is_idle(self) -> bool:
        try:
            return self.run("sinfo", "--noheader", "--format=%T").strip() == "idle"
        except subprocess.CalledProcessError:  # no controller yet
            return False


def small_recipe(site: Path, token: str, keys: Path, *, memory: int) -> str:
    """``deploy/slurm/worker.sbatch`` for the node, in ``site``, which gets what it reads.

    ``keys`` are the service's, ``memory`` is in MB.
    """
    (site / "token").write_text(token)
    shutil.copy(keys, site / "service-keys.json")
    text = RECIPE.read_text().replace("--cpus-per-task=8", "--cpus-per-task=1")
    return text.replace("--mem=64G", f"--mem={memory}M\n#SBATCH --chdir={site}")


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A cluster of one node with two processors and 1,000 MB."""
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
