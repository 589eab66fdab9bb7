"""The page's objects of the Gateway API and of Envoy Gateway, against the types that were made of these projects' sources.

TypeScript's compiler is strict where they are written out as literals: it refuses fields that a type does not have.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.fronts.stage import blocks
from tests.support.tools import ROOT, missing

pytestmark = pytest.mark.tools

PACKAGES: Final = ROOT / ".tools" / "bin" / "gateway-api"
MODULES: Final = {
    "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "gateway.envoyproxy.io/v1alpha1": "@kubernetes-models/envoy-gateway/gateway.envoyproxy.io/v1alpha1",
}


def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(blocks("yaml")[1]))


def complaints(about: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Lines of the compiler."""
    if not PACKAGES.is_dir():
        missing("the Gateway API's types are missing: run scripts/tools.sh") if shutil.which("npm") else pytest.skip(
            "needs npm"
        )
    (folder / "node_modules").symlink_to(PACKAGES / "node_modules")
    (folder / "package.json").write_text('{"type": "module"}', "utf-8")
    lines = [f'import type {{ I{one["kind"]} as T{n} }} from "{MODULES[one["apiVersion"]]}";' for n, one in enumerate(about)]
    lines += [f"export const v{number}: T{number} = {json.dumps(one)};" for number, one in enumerate(about)]
    (folder / "objects.ts").write_text("\n".join(lines), "utf-8")
    tsc = [str(PACKAGES / "node_modules" / ".bin" / "tsc"), "--noEmit", "--strict", "--skipLibCheck", "--preserveSymlinks"]
    done = subprocess.run(
        [*tsc, "--module", "nodenext", "--moduleResolution", "nodenext", "objects.ts"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = done.stdout.splitlines()
    assert bool(found) == bool(done.returncode), done.stderr
    return found


def test_the_objects_of_the_page_are_valid(tmp_path: Path) -> None:
    assert [one["kind"] for one in objects()] == ["Gateway", "HTTPRoute", "BackendTrafficPolicy", "ClientTrafficPolicy"]
    assert complaints(objects(), tmp_path) == []


def test_a_wrong_name_and_a_wrong_type_are_found(tmp_path: Path) -> None:
    """So it is the fields that the test above compares."""
    gateway, route, policy, client = objects()
    gateway["spec"]["listeners"][0]["portt"] = 443
    route["spec"]["rules"][0]["timeoutz"] = {}
    policy["spec"]["loadBalancer"]["consistentHash"]["type"] = "Headerz"
    client["spec"]["timeout"]["http"]["streamIdleTimeout"] = 330
    found = complaints([gateway, route, policy, client], tmp_path)
    assert len(found) == 4, found


def test_they_belong_together_and_to_the_chart() -> None:
    gateway, route, policy, client = objects()
    assert {one["metadata"]["namespace"] for one in objects()} == {"llm"}
    assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
    assert [target["name"] for target in policy["spec"]["targetRefs"]] == [route["metadata"]["name"]]
    assert [target["name"] for target in client["spec"]["targetRefs"]] == [gateway["metadata"]["name"]]
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text("utf-8"))
    backends = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    assert backends == [{"name": "warmroute", "port": values["service"]["port"]}]
