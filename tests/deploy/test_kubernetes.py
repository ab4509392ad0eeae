"""The manifests are valid, run under the restricted standard, and name what there is."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from affidavit.trust.key import SERVICE_ROLES
from affidavit.trust.signers import KEY_VARIABLES
from tests.deploy.manifests import (
    DEPLOY,
    ROOT,
    documents,
    image,
    parsed,
    pods,
    variables,
    violations,
)

FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
ALL = [(path.name, item) for path in FILES for item in documents(path)]
PODS = [(name, pod) for name, each in ALL for pod in pods(each)]
OLDEST = "1.30"
PAGE = (ROOT / "docs/how-to/run-on-kubernetes.md").read_text()


def containers() -> list[dict[str, Any]]:
    return [container for _, pod in PODS for container in pod["containers"]]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize(
    "document", [each for _, each in ALL], ids=[f"{n}-{each['kind']}" for n, each in ALL]
)
def test_a_manifest_is_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)
    assert document["metadata"].get("namespace", "affidavit") == "affidavit"


def test_a_field_that_is_misspelt_is_found() -> None:
    wrong = copy.deepcopy(next(item for _, item in ALL if item["kind"] == "Job"))
    wrong["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


@pytest.mark.parametrize(("name", "pod"), PODS, ids=[name for name, _ in PODS])
def test_a_pod_is_let_into_a_restricted_namespace(name: str, pod: dict[str, Any]) -> None:
    assert violations(pod) == [], name


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda pod: pod["securityContext"].pop("runAsNonRoot"), "root"),
        (lambda pod: pod["securityContext"].pop("seccompProfile"), "system calls"),
        (lambda pod: pod.update(hostPID=True), "hostPID"),
        (lambda pod: pod["volumes"].append({"name": "v", "hostPath": {"path": "/"}}), "volume v"),
        (lambda pod: pod["containers"][0]["securityContext"].pop("capabilities"), "capabilities"),
        (
            lambda pod: pod["containers"][0]["securityContext"].update(privileged=True),
            "more privileges",
        ),
        (
            lambda pod: pod["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
            "writable root",
        ),
        (lambda pod: pod["containers"][0].pop("resources"), "no limits"),
        (lambda pod: pod.pop("automountServiceAccountToken"), "service account's token"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_one_that_asks_for_more_is_not(spoil: Callable[[Any], None], found: str) -> None:
    pod = copy.deepcopy(PODS[0][1])
    spoil(pod)
    assert violations(pod) == [found]


def test_commands_are_those_of_the_programs() -> None:
    for container in containers():
        provided = " ".join([*container["command"], *container.get("args", [])])
        told = provided.replace("$(POD)", "affidavit-worker-5f6c")
        options = parsed(told.split())
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        if "processes" in options:
            assert (options["gpu"], options["processes"]) == (gpus > 0, gpus)


def test_variables_are_read_and_secrets_are_no_values() -> None:
    known = variables()
    assert {"DATABASE_URL", "AFFIDAVIT_TOKEN", "AFFIDAVIT_SERVER"} <= known
    for container in containers():
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", []))))
        for item in container["env"]:
            assert item["name"] in known | used, item
            if re.search("TOKEN|KEY|URL", item["name"]):
                assert "secretKeyRef" in item["valueFrom"], item


def test_ports_users_and_paths_are_those_of_the_image() -> None:
    built = image()
    for name, pod in PODS:
        assert pod["securityContext"]["runAsUser"] == int(built["USER"]), name
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
            assert set(mounts.values()) == volumes
            home = [path for path in mounts if path.startswith("/var/lib/affidavit/")]
            assert all(path.startswith(built["AFFIDAVIT_HOME"]) for path in home)
            ports = [str(port["containerPort"]) for port in container.get("ports", [])]
            if ports:
                assert ports == [built["EXPOSE"]]
                assert parsed(container["command"])["port"] == int(built["EXPOSE"])
            for kind in ("livenessProbe", "startupProbe", "readinessProbe"):
                requested = "/readyz" if kind == "readinessProbe" else "/livez"
                assert (
                    container.get(kind, {"httpGet": {"path": requested}})["httpGet"]["path"]
                    == requested
                )
            if ports:
                assert container.keys() >= {"livenessProbe", "startupProbe", "readinessProbe"}


def test_files_that_a_worker_reads_are_mounted() -> None:
    read = 0
    for container in containers():
        if "args" not in container:
            continue
        paths = [Path(item.partition("=")[2]) for item in container["args"] if "=/" in item]
        mounts = [Path(entry["mountPath"]) for entry in container["volumeMounts"]]
        for path in paths:
            assert any(path.is_relative_to(mount) for mount in mounts), path
            read += 1
    assert read == 4


def test_the_page_makes_everything_that_is_referred_to() -> None:
    """Every secret and configuration with its keys, and applies every file."""
    text = PAGE.replace("\\\n", " ")
    created: dict[tuple[str, str], set[str]] = {}
    for line in re.findall(r"^kubectl .*create (?:secret|configmap).*$", text, re.MULTILINE):
        words = shlex.split(line)
        kind = "secretKeyRef" if "secret" in words else "configMap"
        name = words[words.index("generic" if "secret" in words else "configmap") + 1]
        keys = re.findall(r"--from-(?:literal|file)=([\w.-]+)=", line)
        created.setdefault((kind, name), set()).update(keys)
    requested: dict[tuple[str, str], set[str]] = {}
    for _, pod in PODS:
        for volume in pod["volumes"]:
            if "configMap" in volume:
                requested.setdefault(("configMap", volume["configMap"]["name"]), set())
        for container in pod["containers"]:
            for item in container["env"]:
                if reference := item.get("valueFrom", {}).get("secretKeyRef"):
                    keys = requested.setdefault(("secretKeyRef", reference["name"]), set())
                    keys.add(reference["key"])
    assert created.keys() == requested.keys()
    assert all(keys <= created[name] for name, keys in requested.items())
    assert "certificate.json" in created["configMap", "affidavit-service-keys"]
    assert not [path.name for path in FILES if f"build/kubernetes/{path.name}" not in text]


def test_the_service_is_reached_where_workers_look_for_it() -> None:
    (service,) = (entry for _, entry in ALL if entry["kind"] == "Service")
    (port,) = service["spec"]["ports"]
    url = f"http://{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    deployed = next(
        entry
        for _, entry in ALL
        if entry["metadata"]["name"] == "affidavit" and entry["kind"] == "Deployment"
    )
    assert port["port"] == 80
    labels = deployed["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    servers = [item for one in containers() for item in one.get("args", []) if "server=" in item]
    assert servers == [f"--server={url}"] * 2
    others = [
        entry["spec"]["template"]["metadata"]["labels"]
        for _, entry in ALL
        if entry["kind"] in ("Job", "Deployment")
    ]
    assert sum(service["spec"]["selector"].items() <= other.items() for other in others) == 1


# ---- images, keys, network and drains ---------------------------------------------------

BY_DIGEST = re.compile(r"[a-z0-9][a-z0-9./-]*@sha256:[0-9a-f]{64}")
SERVICE, WORKER = (f"example.com/{name}@sha256:{'1a' * 32}" for name in ("affidavit", "w"))


def pin(folder: Path, **images: str) -> subprocess.CompletedProcess[str]:
    """``make pin-images`` in a copy of what it reads."""
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copytree(DEPLOY, folder / "deploy", dirs_exist_ok=True)
    given = [f"{name}={image}" for name, image in images.items()]
    command = ["make", "pin-images", *given]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_images_are_named_by_digest_and_unpinned_ones_exist_nowhere() -> None:
    for container in containers():
        assert BY_DIGEST.fullmatch(container["image"]), container["image"]
        assert container["image"].startswith("registry.invalid/")  # RFC 6761: never resolved


def test_pinned_manifests_have_these_images(tmp_path: Path) -> None:
    assert pin(tmp_path, SERVICE=SERVICE, WORKER=WORKER).returncode == 0
    pinned = {
        path.name: [
            container["image"]
            for each in documents(path)
            for pod in pods(each)
            for container in pod["containers"]
        ]
        for path in (tmp_path / "build/kubernetes").iterdir()
    }
    assert pinned.keys() == {path.name for path in FILES}
    assert pinned["service.yaml"] == pinned["migrate.yaml"] == [SERVICE]
    assert pinned["worker.yaml"] == pinned["worker-job.yaml"] == [WORKER]


@pytest.mark.parametrize("image", ["", "affidavit:0.2.0", "affidavit@sha256:12", f"{SERVICE}|x"])
def test_nothing_is_pinned_to_a_tag(image: str, tmp_path: Path) -> None:
    assert pin(tmp_path, SERVICE=SERVICE, WORKER=image).returncode != 0
    assert not (tmp_path / "build").exists()


def kinds(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in ALL if document["kind"] == kind]


ADMITS = re.compile(
    r"(?:!has\(object\.spec\.(\w+)\) \|\| )?"
    r"object\.spec\.(\w+)\.all\(c, c\.image\.matches\('([^']+)'\)\)"
)
"""The only form of expression that the policy of images has."""


def test_the_namespace_admits_no_tag() -> None:
    (policy,), (binding,) = (
        kinds("ValidatingAdmissionPolicy"),
        kinds("ValidatingAdmissionPolicyBinding"),
    )
    assert policy["spec"]["failurePolicy"] == "Fail"
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert set(rule["resources"]) == {"pods", "pods/ephemeralcontainers"}
    assert set(rule["operations"]) == {"CREATE", "UPDATE"}
    expressions = [" ".join(item["expression"].split()) for item in policy["spec"]["validations"]]
    patterns = {}
    for expression in expressions:
        optional, name, pattern = ADMITS.fullmatch(expression).groups()  # type: ignore[union-attr]
        assert optional == (None if name == "containers" else name)
        patterns[name] = re.compile(pattern)
    assert patterns.keys() == {"containers", "initContainers", "ephemeralContainers"}
    digest = "1a" * 32
    for pattern in patterns.values():
        assert pattern.search(SERVICE)
        for name in (
            *("affidavit", "affidavit:0.2.0", "affidavit@sha256:", f"affidavit@sha512:{digest}"),
            *(f"affidavit@sha256:{digest}0", f"a@sha256:{digest}:latest", "a@sha256:12:latest"),
        ):
            assert not pattern.search(name), name
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"]


def test_each_role_of_the_service_has_a_secret_of_its_own() -> None:
    (service,) = (one for one in containers() if one["name"] == "service")
    secrets = {
        item["name"]: item["valueFrom"]["secretKeyRef"]["name"]
        for item in service["env"]
        if item["name"].startswith("AFFIDAVIT_SIGNING_KEY")
    }
    assert secrets.keys() == set(KEY_VARIABLES)
    assert len(set(secrets.values())) == len(SERVICE_ROLES)
    for role in SERVICE_ROLES:
        assert f"affidavit-{role}-key" in secrets.values()
        assert f"affidavit keys new --role {role} " in PAGE
    for container in containers():
        read = {
            item["valueFrom"]["secretKeyRef"]["name"]
            for item in container["env"]
            if "secretKeyRef" in item.get("valueFrom", {})
        }
        assert container["name"] == "service" or not read & set(secrets.values())


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    required = selector.get("matchLabels", {}).items() <= labels.items()
    return required and all(
        condition["operator"] == "In" and labels.get(condition["key"]) in condition["values"]
        for condition in selector.get("matchExpressions", [])
    )


def test_pods_reach_what_is_listed_and_nothing_else() -> None:
    policies = kinds("NetworkPolicy")
    everything = [one for one in policies if one["spec"]["podSelector"] == {}]
    assert any(
        set(one["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        and one["spec"].keys() == {"podSelector", "policyTypes"}
        for one in everything
    ), "nothing is denied by default"
    (names,) = (one for one in everything if one["spec"].keys() > {"podSelector", "policyTypes"})
    (rule,) = names["spec"]["egress"]
    assert {port["port"] for port in rule["ports"]} == {53}
    (target,) = rule["to"]
    assert selects(target["namespaceSelector"], {"kubernetes.io/metadata.name": "kube-system"})
    assert "ingress" not in names["spec"]
    reached: dict[str, set[int]] = {}
    for document in (*kinds("Deployment"), *kinds("Job")):
        labels = document["spec"]["template"]["metadata"]["labels"]
        own = [
            one
            for one in policies
            if one not in everything and selects(one["spec"]["podSelector"], labels)
        ]
        (policy,) = own
        egress = policy["spec"]["egress"]
        ports = {port["port"] for rule in egress for port in rule["ports"]}
        component = labels["app.kubernetes.io/component"]
        reached[component] = ports
        if component.startswith("worker"):
            (rule,) = egress
            (target,) = rule["to"]
            (service,) = kinds("Service")
            assert selects(target["podSelector"], service["spec"]["selector"])
            (open_port,) = [one for one in policies if one["spec"].get("ingress")]
            (heard,) = open_port["spec"]["ingress"]
            assert {port["port"] for port in heard["ports"]} == {8000}
            proxies, workers = heard["from"]
            assert proxies == {"namespaceSelector": {"matchLabels": {"affidavit-ingress": "true"}}}
            assert selects(workers["podSelector"], labels)
            assert selects(open_port["spec"]["podSelector"], service["spec"]["selector"])
    assert reached == {
        "service": {5432, 443},
        "migrate": {5432},
        "worker": {8000},
        "worker-job": {8000},
    }


def test_a_drain_leaves_somebody_at_work() -> None:
    budgets = kinds("PodDisruptionBudget")
    for document in kinds("Deployment"):
        labels = document["spec"]["template"]["metadata"]["labels"]
        (budget,) = (one for one in budgets if selects(one["spec"]["selector"], labels))
        replicas, spec = document["spec"]["replicas"], budget["spec"]
        left = spec.get("minAvailable", replicas - spec.get("maxUnavailable", 0))
        assert 0 < left < replicas  # and it can be drained at all


def named(documents: list[tuple[str, dict[str, Any]]], name: str, kind: str) -> dict[str, Any]:
    return next(
        document["spec"]
        for _, document in documents
        if (document["metadata"]["name"], document["kind"]) == (name, kind)
    )


def policy_of(documents: Any, name: str) -> dict[str, Any]:
    return named(documents, f"affidavit-{name}", "NetworkPolicy")


def service_container(documents: Any) -> dict[str, Any]:
    spec = named(documents, "affidavit", "Deployment")
    return dict(spec["template"]["spec"]["containers"][0])


def share_key(documents: Any) -> None:
    first, other = (
        item
        for item in service_container(documents)["env"]
        if item["name"] in ("AFFIDAVIT_SIGNING_KEY", "AFFIDAVIT_SIGNING_KEY_STATUS")
    )
    other["valueFrom"] = first["valueFrom"]


def give_key_to_workers(documents: Any) -> None:
    spec = named(documents, "affidavit-worker", "Deployment")["template"]["spec"]
    for item in spec["containers"][0]["env"]:
        if item["name"] == "AFFIDAVIT_SIGNING_KEY":
            item["valueFrom"]["secretKeyRef"]["name"] = "affidavit-certificate-key"


LAXER: dict[str, tuple[Callable[[], None], Callable[[Any], Any]]] = {
    "any source is heard": (
        test_pods_reach_what_is_listed_and_nothing_else,
        lambda all_: policy_of(all_, "service")["ingress"][0]["from"][0].update(
            namespaceSelector={}
        ),
    ),
    "another port is heard": (
        test_pods_reach_what_is_listed_and_nothing_else,
        lambda all_: policy_of(all_, "service")["ingress"][0]["ports"].append({"port": 5432}),
    ),
    "all pods reach what names are asked of": (
        test_pods_reach_what_is_listed_and_nothing_else,
        lambda all_: policy_of(all_, "names")["egress"][0]["ports"].append({"port": 443}),
    ),
    "workers reach the database": (
        test_pods_reach_what_is_listed_and_nothing_else,
        lambda all_: policy_of(all_, "worker")["egress"][0]["ports"].append({"port": 5432}),
    ),
    "nothing is denied": (
        test_pods_reach_what_is_listed_and_nothing_else,
        lambda all_: policy_of(all_, "nothing").update(ingress=[{}]),
    ),
    "a drain ends both replicas": (
        test_a_drain_leaves_somebody_at_work,
        lambda all_: named(all_, "affidavit", "PodDisruptionBudget").update(
            minAvailable=0, maxUnavailable=2
        ),
    ),
    "one replica is at work": (
        test_a_drain_leaves_somebody_at_work,
        lambda all_: named(all_, "affidavit", "Deployment").update(replicas=1),
    ),
    "no drain ends": (
        test_a_drain_leaves_somebody_at_work,
        lambda all_: named(all_, "affidavit", "PodDisruptionBudget").update(minAvailable=2),
    ),
    "one key in two roles": (test_each_role_of_the_service_has_a_secret_of_its_own, share_key),
    "a worker with the service's key": (
        test_each_role_of_the_service_has_a_secret_of_its_own,
        give_key_to_workers,
    ),
    "a tag": (
        test_images_are_named_by_digest_and_unpinned_ones_exist_nowhere,
        lambda all_: named(all_, "affidavit", "Deployment")["template"]["spec"]["containers"][
            0
        ].update(image="registry.invalid/affidavit:0.2.0"),
    ),
}


@pytest.mark.parametrize("name", LAXER)
def test_laxer_manifests_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, change = LAXER[name]
    law()
    changed = copy.deepcopy(ALL)
    change(changed)
    assert changed != ALL
    monkeypatch.setitem(globals(), "ALL", changed)
    monkeypatch.setitem(globals(), "PODS", [(n, pod) for n, each in changed for pod in pods(each)])
    with pytest.raises((AssertionError, ValueError)):
        law()
