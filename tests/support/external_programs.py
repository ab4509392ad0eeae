"""Install programs that the tests run and no Python package ships.

``make test`` runs ``python -m tests.support.external_programs``, which installs missing programs
from Debian's packages if it may, and otherwise exits with 1 and says what to install: no test is
skipped because a program is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGES = {
    "openssl": "openssl",
    "softhsm2-util": "softhsm2",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
"""Debian's package of each program."""
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""With the folders of daemons, which a user's path need not name."""


def missing() -> list[str]:
    """The packages whose programs are not on the path."""
    return [
        package for program, package in PACKAGES.items() if shutil.which(program, path=PATH) is None
    ]


def install(packages: list[str]) -> None:
    """Install Debian's packages. Raises ``CalledProcessError``."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", "-y", *command], env=environment, check=True, stdout=subprocess.DEVNULL
        )


def main() -> None:
    """Install what is missing, or say what to install."""
    packages = missing()
    if packages and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        install(packages)
        packages = missing()
    if packages:
        sys.exit(f"error: the tests need {', '.join(packages)}; install with your package manager")


if __name__ == "__main__":
    main()
