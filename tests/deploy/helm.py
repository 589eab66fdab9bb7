"""The real helm, what it makes of the chart, and whether Kubernetes accepts that."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.deploy.crds import CRDS
from tests.support.paths import ROOT

CHART = ROOT / "helm"
KUBERNETES = ("1.29.0", "1.32.0", "1.37.0")

Objects = dict[str, dict[str, Any]]
RENDERED: dict[tuple[Path, str, tuple[str, ...]], subprocess.CompletedProcess[str]] = {}

ONE_REPLICA = {"config": {"pools": [{"replicas": ["http://vllm-0:8000"]}]}}


class Helm:
    """One helm binary, kept away from the user's own helm settings."""

    def __init__(self, binary: Path, scratch: Path) -> None:
        self.binary, self.scratch = binary, scratch
        self.env = {**os.environ, "HOME": str(scratch), "HELM_CACHE_HOME": str(scratch), "HELM_CONFIG_HOME": str(scratch)}
        self.env["GOGC"] = "off"  # it ends before its garbage matters

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.binary), *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300, check=False)

    def template(self, values: Mapping[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        """Once for each of several tests of the same values."""
        file, key = self.scratch / "values.json", (self.binary, json.dumps(values), arguments)
        if not (done := RENDERED.get(key)):
            file.write_text(key[1], "utf-8")
            done = self.run("template", "demo", str(CHART), "--namespace", "llm", "--values", str(file), *arguments)
            RENDERED[key] = done
        return done

    def objects(self, values: Mapping[str, Any]) -> Objects:
        """What the values render to, by `kind_of`."""
        done = self.template(values)
        assert done.returncode == 0, done.stderr
        items = [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]
        objects = {kind_of(item): item for item in items}
        if "Role" not in objects:  # of which there may be several
            assert len(objects) == len(items), [kind_of(item) for item in items]
        return objects

    def refusal(self, values: Mapping[str, Any]) -> str:
        done = self.template(values)
        assert done.returncode != 0, "helm rendered what it should refuse"
        return done.stderr


class UniqueKeys(yaml.CSafeLoader):
    """Refuses a mapping with the same key twice, as the Kubernetes API does in strict mode."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key appears twice: {keys}"
        return super().construct_mapping(node, deep)


def kind_of(item: Mapping[str, Any]) -> str:
    """The object's kind; beside the gateway it is "KIND of PART". Of two ConfigMaps one is `Dashboards`, of two Services one is
    `MetricsService`.
    """
    labels, kind = item["metadata"]["labels"], str(item["kind"])
    if kind == "Service" and labels.get("app.kubernetes.io/component") == "metrics":
        return "MetricsService"
    if "app.kubernetes.io/part-of" in labels:
        return f"{kind} of {labels['app.kubernetes.io/name'].rpartition('-')[2]}"
    return "Dashboards" if "grafana_dashboard" in labels else kind


def container(objects: Objects) -> dict[str, Any]:
    (only,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def pod(objects: Objects) -> dict[str, Any]:
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def changed(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the values with the dotted path set."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    *parents, last = path.split(".")
    here = copy
    for key in parents:
        here = here.setdefault(key, {})
    here[last] = value
    return copy


def validate(item: Mapping[str, Any]) -> None:
    """Raises where the API of Kubernetes would refuse the object, or not know a field of it."""
    if crd := CRDS.get((item["apiVersion"], item["kind"])):
        jsonschema.Draft202012Validator(crd).validate(item)
        return
    for version in KUBERNETES:
        schema_of(item["kind"], item["apiVersion"], version).validate(item)


@cache
def schema_of(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    """A schema of kubernetes_validate, whose own `validate` reads a megabyte for each object."""
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    group, _, name = api_version.rpartition("/")
    whole = f"{kind.lower()}-{group.partition('.')[0]}-{name}" if group else f"{kind.lower()}-{name}"
    schema, definitions = (schema_contents(f"{folder}/{file}.json", version) for file in (whole, "_definitions"))
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)
