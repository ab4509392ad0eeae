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
    assert policy["spec"].keys() == {"failurePolicy", "matchConstraints", "validations"}
    assert policy["spec"]["failurePolicy"] == "Fail"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"]}
    rule["resources"] = ["pods", "pods/ephemeralcontainers"]
    assert policy["spec"]["matchConstraints"] == {"resourceRules": [rule]}
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
    here = {"matchLabels": {"kubernetes.io/metadata.name": "affidavit"}}
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": here},
    }


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


def components() -> dict[str, dict[str, str]]:
    """The labels of the pods, by their component."""
    labels = [
        each["spec"]["template"]["metadata"]["labels"]
        for _, each in ALL
        if each["kind"] in ("Deployment", "Job")
    ]
    result = {each["app.kubernetes.io/component"]: each for each in labels}
    assert len(result) == len(labels)
    return result


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    required = selector.get("matchLabels", {}).items() <= labels.items()
    conditions = selector.get("matchExpressions", [])
    assert all(condition["operator"] == "In" for condition in conditions)
    return required and all(
        labels.get(condition["key"]) in condition["values"] for condition in conditions
    )


def selected(selector: dict[str, Any]) -> str:
    found = (name for name, labels in components().items() if selects(selector, labels))
    return " and ".join(sorted(found))


def peer(item: dict[str, Any]) -> str:
    ((kind, selector),) = item.items()
    if kind == "podSelector":
        return f"pods of {selected(selector)}"
    assert kind == "namespaceSelector"
    ((key, value),) = selector.pop("matchLabels").items() if len(selector) == 1 else ()
    return f"namespaces with {key}: {value}"


def permitted() -> tuple[set[tuple[str, str]], set[tuple[str, str, str, str]]]:
    """Whose traffic is denied, in which direction; and what the policies permit, as a table."""
    denied, rows = set(), set()
    for policy in copy.deepcopy(kinds("NetworkPolicy")):
        spec = policy["spec"]
        directions = {"Ingress": "ingress", "Egress": "egress"}
        assert spec.keys() <= {"podSelector", "policyTypes", *directions.values()}
        assert {name for name, key in directions.items() if key in spec} <= set(spec["policyTypes"])
        pods_of = selected(spec["podSelector"])
        denied |= {(pods_of, direction) for direction in spec["policyTypes"]}
        for direction in spec["policyTypes"]:
            for rule in spec.get(directions[direction], []):
                end = "from" if direction == "Ingress" else "to"
                assert rule.keys() <= {end, "ports"}
                assert rule["ports"]  # without any, all are permitted
                ends = [peer(item) for item in rule.get(end, [])] or ["anywhere"]
                ports = {f"{port.pop('protocol')} {port.pop('port')}" for port in rule["ports"]}
                assert not any(rule["ports"])  # such as the end of a range
                rows |= {(pods_of, end, other, port) for other in ends for port in ports}
    return denied, rows


def test_pods_reach_what_is_listed_and_nothing_else() -> None:
    everybody, workers = selected({}), "worker and worker-job"
    denied, rows = permitted()
    both = ("Ingress", "Egress")
    assert {(everybody, direction) for direction in both} <= denied
    service = (f"pods of {workers}", "namespaces with affidavit-ingress: true")
    system = "namespaces with kubernetes.io/metadata.name: kube-system"
    assert rows == {
        *((everybody, "to", system, f"{protocol} 53") for protocol in ("UDP", "TCP")),
        *(("service", "from", other, "TCP 8000") for other in service),
        *(("service", "to", "anywhere", f"TCP {port}") for port in (443, 5432)),
        ("migrate", "to", "anywhere", "TCP 5432"),
        (workers, "to", "pods of service", "TCP 8000"),
    }
    (service_,) = kinds("Service")
    assert service_["spec"].keys() == {"selector", "ports"}  # of the cluster alone
    assert selected({"matchLabels": service_["spec"]["selector"]}) == "service"


FIELDS = {
    "pod": "automountServiceAccountToken containers restartPolicy securityContext "
    "terminationGracePeriodSeconds volumes",
    "securityContext": "fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot runAsUser "
    "seccompProfile",
    "container": "args command env image livenessProbe name ports readinessProbe resources "
    "securityContext startupProbe volumeMounts",
    "Deployment": "replicas selector template",
    "Job": "backoffLimit template ttlSecondsAfterFinished",
    "PodDisruptionBudget": "maxUnavailable minAvailable selector",
}
"""Fields that the manifests may have; others may loosen what these say."""
KINDS = {
    *("Deployment", "Job", "Namespace", "NetworkPolicy", "PersistentVolumeClaim"),
    *("PodDisruptionBudget", "Service"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
}
KEYS_OF = {f"affidavit-{role}-key": "private.pem" for role in SERVICE_ROLES}
READS = {
    "service": {("affidavit-database", "app-url"), *KEYS_OF.items()},
    "migrate": {("affidavit-database", "owner-url")},
    "worker": {("affidavit-worker", "token"), ("affidavit-worker", "private.pem")},
}
"""The keys of secrets that each container reads."""


def test_nothing_is_run_or_read_but_what_is_listed() -> None:
    def known(document: dict[str, Any], kind: str) -> None:
        assert document.keys() <= set(FIELDS[kind].split()), kind

    assert {document["kind"] for _, document in ALL} == KINDS
    for kind in ("Deployment", "Job", "PodDisruptionBudget"):
        for document in kinds(kind):
            known(document["spec"], kind)
    for _, pod in PODS:
        context = pod["securityContext"]
        known(pod, "pod")
        known(context, "securityContext")
        (own,) = {context["runAsUser"], context["runAsGroup"], context.get("fsGroup", 10001)}
        assert own > 0
        configured = {volume["name"] for volume in pod["volumes"] if "configMap" in volume}
        assert not any(volume.keys() & {"secret", "projected"} for volume in pod["volumes"])
        (container,) = pod["containers"]
        known(container, "container")
        assert container["securityContext"].keys() == {
            *("allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"),
        }
        mounts = container["volumeMounts"]
        assert configured == {item["name"] for item in mounts if item.get("readOnly")}
        sources = [item["valueFrom"] for item in container["env"] if "valueFrom" in item]
        assert {key for source in sources for key in source} <= {"secretKeyRef", "fieldRef"}
        read = [source["secretKeyRef"] for source in sources if "secretKeyRef" in source]
        assert all(item.keys() == {"name", "key"} for item in read)
        assert {(item["name"], item["key"]) for item in read} == READS[container["name"]]


def test_the_namespace_forbids_what_the_restricted_standard_forbids() -> None:
    (namespace,) = kinds("Namespace")
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    assert namespace["metadata"]["labels"] == labels


def test_a_drain_leaves_somebody_at_work() -> None:
    budgets = kinds("PodDisruptionBudget")
    for document in kinds("Deployment"):
        labels = document["spec"]["template"]["metadata"]["labels"]
        (budget,) = (one for one in budgets if selects(one["spec"]["selector"], labels))
        replicas, spec = document["spec"]["replicas"], budget["spec"]
        left = spec.get("minAvailable", replicas - spec.get("maxUnavailable", 0))
        assert 0 < left < replicas  # and it can be drained at all


Change = Callable[[Any], Any]


def spec(documents: Any, kind: str, name: str) -> Any:
    return next(
        document["spec"]
        for _, document in documents
        if (document["metadata"]["name"], document["kind"]) == (name, kind)
    )


def pod_of(documents: Any, name: str = "affidavit") -> Any:
    kind = "Job" if name in ("affidavit-migrate", "affidavit-worker-once") else "Deployment"
    return spec(documents, kind, name)["template"]["spec"]


def policy_of(documents: Any, name: str) -> Any:
    return spec(documents, "NetworkPolicy", f"affidavit-{name}")


def images_of(documents: Any, bound: str = "") -> Any:
    return spec(documents, f"ValidatingAdmissionPolicy{bound}", "affidavit-images-by-digest")


def labels_of(documents: Any) -> Any:
    return next(one for _, one in documents if one["kind"] == "Namespace")["metadata"]["labels"]


def reads(documents: Any, name: str, place: int) -> Any:
    return pod_of(documents, name)["containers"][0]["env"][place]["valueFrom"]["secretKeyRef"]


def add(documents: Any, kind: str, **fields: Any) -> None:
    metadata = {"name": "more", "namespace": "affidavit"}
    documents.append(("more.yaml", {"kind": kind, "metadata": metadata, **fields}))


ALL_PODS: dict[str, Any] = {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": []}]}
KEY = {"secretRef": {"name": "affidavit-status-key"}}
REACH = test_pods_reach_what_is_listed_and_nothing_else
DRAIN = test_a_drain_leaves_somebody_at_work
LISTED = test_nothing_is_run_or_read_but_what_is_listed
TAGS = test_the_namespace_admits_no_tag
PINNED = test_images_are_named_by_digest_and_unpinned_ones_exist_nowhere
STANDARD = test_the_namespace_forbids_what_the_restricted_standard_forbids
LAXER: dict[str, tuple[Callable[[], None], Change]] = {
    # the network
    "any namespace is heard": (
        REACH,
        lambda all_: policy_of(all_, "service")["ingress"][0]["from"][0].update(
            namespaceSelector={}
        ),
    ),
    "anybody is heard": (REACH, lambda all_: policy_of(all_, "service")["ingress"][0].pop("from")),
    "another port is heard": (
        REACH,
        lambda all_: policy_of(all_, "service")["ingress"][0]["ports"].append(
            {"protocol": "TCP", "port": 5432}
        ),
    ),
    "a range of ports is heard": (
        REACH,
        lambda all_: policy_of(all_, "service")["ingress"][0]["ports"][0].update(endPort=65535),
    ),
    "a direction is not denied": (
        REACH,
        lambda all_: policy_of(all_, "nothing").update(policyTypes=["Egress"]),
    ),
    "nothing is denied": (REACH, lambda all_: policy_of(all_, "nothing").update(ingress=[{}])),
    "only one component is denied": (
        REACH,
        lambda all_: policy_of(all_, "nothing").update(
            podSelector={"matchLabels": {"app.kubernetes.io/component": "worker"}}
        ),
    ),
    "names are looked up anywhere": (
        REACH,
        lambda all_: policy_of(all_, "names")["egress"][0]["to"][0].update(namespaceSelector={}),
    ),
    "all pods reach another port of the system": (
        REACH,
        lambda all_: policy_of(all_, "names")["egress"][0]["ports"].append(
            {"protocol": "TCP", "port": 443}
        ),
    ),
    "workers reach the database": (
        REACH,
        lambda all_: policy_of(all_, "worker")["egress"][0]["ports"].append(
            {"protocol": "TCP", "port": 5432}
        ),
    ),
    "workers reach all pods": (
        REACH,
        lambda all_: policy_of(all_, "worker")["egress"][0]["to"][0].update(podSelector={}),
    ),
    "workers reach such pods of other namespaces": (
        REACH,
        lambda all_: policy_of(all_, "worker")["egress"][0]["to"][0].update(namespaceSelector={}),
    ),
    "one more policy": (REACH, lambda all_: add(all_, "NetworkPolicy", spec=ALL_PODS)),
    "the service is published on each node": (
        REACH,
        lambda all_: spec(all_, "Service", "affidavit").update(type="NodePort"),
    ),
    # drains
    "a drain ends both replicas": (
        DRAIN,
        lambda all_: spec(all_, "PodDisruptionBudget", "affidavit").update(
            minAvailable=0, maxUnavailable=2
        ),
    ),
    "one replica is at work": (
        DRAIN,
        lambda all_: spec(all_, "Deployment", "affidavit").update(replicas=1),
    ),
    "no drain ends": (
        DRAIN,
        lambda all_: spec(all_, "PodDisruptionBudget", "affidavit").update(minAvailable=2),
    ),
    "an upgrade ends both replicas": (
        LISTED,
        lambda all_: spec(all_, "Deployment", "affidavit").update(strategy={"type": "Recreate"}),
    ),
    # keys
    "one key in two roles": (
        test_each_role_of_the_service_has_a_secret_of_its_own,
        lambda all_: reads(all_, "affidavit", 3).update(reads(all_, "affidavit", 1)),
    ),
    "a worker with the service's key": (
        LISTED,
        lambda all_: reads(all_, "affidavit-worker", 2).update(name="affidavit-certificate-key"),
    ),
    "a worker with all of a secret": (
        LISTED,
        lambda all_: pod_of(all_, "affidavit-worker")["containers"][0].update(envFrom=[KEY]),
    ),
    "a worker with a secret in a file": (
        LISTED,
        lambda all_: pod_of(all_, "affidavit-worker-once")["volumes"].append(
            {"name": "more", "secret": {"secretName": "affidavit-status-key"}}
        ),
    ),
    "the service with the owner's connection": (
        LISTED,
        lambda all_: reads(all_, "affidavit", 0).update(key="owner-url"),
    ),
    "the service without one of its keys": (
        LISTED,
        lambda all_: reads(all_, "affidavit", 3).update(optional=True),
    ),
    "a secret among the manifests": (LISTED, lambda all_: add(all_, "Secret")),
    # pods
    "an account of the cluster": (LISTED, lambda all_: pod_of(all_).update(serviceAccountName="a")),
    "an account with rights": (LISTED, lambda all_: add(all_, "RoleBinding", subjects=[])),
    "another kind of pod": (LISTED, lambda all_: add(all_, "CronJob", spec={})),
    "the root's group": (LISTED, lambda all_: pod_of(all_)["securityContext"].update(runAsGroup=0)),
    "processes of other containers": (
        LISTED,
        lambda all_: pod_of(all_).update(shareProcessNamespace=True),
    ),
    "public keys that a container can rewrite": (
        LISTED,
        lambda all_: pod_of(all_)["containers"][0]["volumeMounts"][-1].pop("readOnly"),
    ),
    "a laxer standard": (
        STANDARD,
        lambda all_: labels_of(all_).update({"pod-security.kubernetes.io/enforce": "baseline"}),
    ),
    "an older standard": (
        STANDARD,
        lambda all_: labels_of(all_).update({"pod-security.kubernetes.io/enforce-version": "v1.0"}),
    ),
    # images
    "a tag": (
        PINNED,
        lambda all_: pod_of(all_)["containers"][0].update(image="registry.invalid/affidavit:1"),
    ),
    "a container of a tag that starts first": (
        LISTED,
        lambda all_: pod_of(all_).update(initContainers=[{"name": "first", "image": "busybox:1"}]),
    ),
    "tags in another namespace": (
        TAGS,
        lambda all_: images_of(all_, "Binding")["matchResources"]["namespaceSelector"][
            "matchLabels"
        ].update({"kubernetes.io/metadata.name": "other"}),
    ),
    "tags of pods with a label": (
        TAGS,
        lambda all_: images_of(all_)["matchConstraints"].update(
            objectSelector={"matchLabels": {"is": "checked"}}
        ),
    ),
    "tags under a condition": (
        TAGS,
        lambda all_: images_of(all_).update(
            matchConditions=[{"name": "never", "expression": "false"}]
        ),
    ),
    "tags of excluded pods": (
        TAGS,
        lambda all_: images_of(all_, "Binding")["matchResources"].update(excludeResourceRules=[{}]),
    ),
    "tags where the policy fails": (
        TAGS,
        lambda all_: images_of(all_).update(failurePolicy="Ignore"),
    ),
    "tags that are only told": (
        TAGS,
        lambda all_: images_of(all_, "Binding").update(validationActions=["Audit"]),
    ),
}


def test_laxer_manifests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for law in {law for law, _ in LAXER.values()}:
        law()
    for name, (law, change) in LAXER.items():
        changed = copy.deepcopy(ALL)
        change(changed)
        assert changed != ALL, name
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "ALL", changed)
            patch.setitem(globals(), "PODS", [(n, pod) for n, one in changed for pod in pods(one)])
            assert is_found(law), name


def is_found(law: Callable[[], None]) -> bool:
    try:
        law()
    except (AssertionError, KeyError, ValueError):
        return True
    return False
