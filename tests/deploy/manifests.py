"""What the recipes are read with: their documents, and what the image and the programs take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from typer.main import get_command

from affidavit.gate.cli import COMMANDS
from affidavit.service.__main__ import app as service
from affidavit.worker import app as worker
from tests.release.image import instructions

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
READ_BY = (
    "service/settings.py",
    "trust/signers.py",
    "trust/key.py",
    "worker/__main__.py",
)
"""Where environment variables are read."""
OTHERS = {"OMP_NUM_THREADS"}
"""Read by PyTorch and numpy."""


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file, in which no key stands twice."""
    return [item for item in YAML(typ="safe").load_all(path.read_text()) if item is not None]


def variables() -> set[str]:
    """Every environment variable that the service or the worker reads."""
    result = set(OTHERS)
    for name in READ_BY:
        path = ROOT / name
        for file in path.glob("*.py") if path.is_dir() else [path]:
            result |= set(
                re.findall(r"\b(AFFIDAVIT_[A-Z0-9_]*[A-Z0-9]|DATABASE_URL)\b", file.read_text())
            )
    return result


def image() -> dict[str, str]:
    """What the image sets: its variables, and USER, EXPOSE."""
    result = {}
    for word, rest in instructions(1):
        if word == "ENV":
            result |= dict(pair.split("=", 1) for pair in rest.split())
        elif word in ("USER", "EXPOSE"):
            result[word] = rest.strip()
    return result


def parsed(command: Sequence[str]) -> dict[str, Any]:
    """The options of a command of the image, as its program reads them; fails if it does not."""
    if list(command[:3]) == ["python", "-m", "affidavit.service"]:
        command = ["affidavit", *command[3:]]
    program, name, *rest = command
    assert program == "affidavit", command
    assert name in COMMANDS, command
    read: Any = get_command(worker if name == "worker" else service)
    if name != "worker":
        read = read.commands[name]
    while hasattr(read, "commands"):
        read = read.commands[rest.pop(0)]
    return dict(read.make_context(name, rest).params)


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The specification of what a document has run."""
    if document["kind"] in ("Job", "Deployment"):
        yield document["spec"]["template"]["spec"]


def violations(pod: dict[str, Any]) -> list[str]:
    """What the restricted Pod Security Standard forbids of it, and what it leaves to us.

    Reference: kubernetes.io/docs/concepts/security/pod-security-standards, "Restricted".
    """
    of_pod, result = pod.get("securityContext", {}), []
    kinds = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    for volume in pod.get("volumes", []):
        if not set(volume) - {"name"} <= kinds:
            result.append(f"volume {volume['name']}")
    result += [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    if pod.get("automountServiceAccountToken") is not False:
        result.append("service account's token")
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = {**of_pod, **container.get("securityContext", {})}
        if own.get("runAsNonRoot") is not True or own.get("runAsUser", 0) == 0:
            result.append("root")
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            result.append("more privileges")
        if own.get("capabilities", {}) != {"drop": ["ALL"]}:
            result.append("capabilities")
        if own.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            result.append("system calls")
        if own.get("readOnlyRootFilesystem") is not True:
            result.append("writable root")
        result += ["port of the host" for port in container.get("ports", []) if "hostPort" in port]
        if "limits" not in container.get("resources", {}):
            result.append("no limits")
    return result
