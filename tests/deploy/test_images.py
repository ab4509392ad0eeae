"""The worker's image is the service's with what trains, pinned by hash and to the same versions."""

from __future__ import annotations

import re

from tests.deploy.manifests import DEPLOY, ROOT, image

DOCKERFILE = (DEPLOY / "worker" / "Dockerfile").read_text()


def pins(name: str) -> dict[str, str]:
    result = re.findall(
        r"^([a-z0-9._-]+)(?:\[[a-z]+\])?==(\S+)", (ROOT / name).read_text(), re.MULTILINE
    )
    return dict(result)


def test_what_both_images_have_is_the_same() -> None:
    service, worker = pins("requirements-run.lock"), pins("deploy/worker/requirements.lock")
    assert service.items() <= worker.items()
    assert {"torch", "safetensors", "scikit-learn"} <= worker.keys() - service.keys()


def test_it_is_pinned_by_hash_and_runs_as_nobody_special() -> None:
    text = (DEPLOY / "worker" / "requirements.lock").read_text()
    assert text.count("--hash=sha256:") >= len(pins("deploy/worker/requirements.lock"))
    assert "://" not in text
    assert "--require-hashes" in DOCKERFILE
    users = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert users[-1] == image()["USER"]
