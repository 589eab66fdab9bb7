"""The files in docs/quickstart-vllm-kubernetes.md as they stand there: valid for Kubernetes, and they fit each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.features.discovery.kubernetes.objects import DEFAULT_PORT
from replica.flags import parser
from tests.deploy.conftest import ROOT
from tests.support.configs import load
from tests.support.tools import tool

PAGE = (ROOT / "docs" / "quickstart-vllm-kubernetes.md").read_text("utf-8")
ENGINE, VALUES, SIMULATED = (list(yaml.safe_load_all(block)) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S))
KUBERNETES = ("1.29.0", "1.37.0")


def test_the_manifests_are_valid() -> None:
    for manifest in ENGINE:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_gateway_is_given_the_name_of_the_service_and_its_port() -> None:
    service, engines = ENGINE
    (values,) = VALUES
    assert service["spec"]["clusterIP"] == "None"
    assert engines["spec"]["serviceName"] == service["metadata"]["name"]
    assert engines["metadata"]["namespace"] == service["metadata"]["namespace"] == "llm"  # that of the commands
    assert values["config"]["discovery"] == [{"kubernetes": service["metadata"]["name"]}]
    assert service["spec"]["ports"] == [{"name": DEFAULT_PORT, "port": port_of()}]
    assert container()["ports"] == [{"name": DEFAULT_PORT, "containerPort": port_of()}]
    template = engines["spec"]["template"]
    assert template["metadata"]["labels"] == engines["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_one_model_is_served_priced_and_asked_for() -> None:
    command = container()["command"]
    (model,) = VALUES[0]["config"]["prices"]
    assert model in command
    assert f'"model": "{model}"' in PAGE


def test_the_simulated_replica_has_these_flags() -> None:
    command = SIMULATED[0]["command"]
    assert command[:2] == ["warmroute", "replica"]
    options = parser().parse_args(command[2:])
    (model,) = VALUES[0]["config"]["prices"]
    assert (options.engine, options.port, options.served_model_name) == ("sim", port_of(), model)
    assert {"image", "command", "resources"} <= set(container())  # the parts to replace, by the page


def port_of() -> int:
    (port,) = ENGINE[0]["spec"]["ports"]
    return int(port["port"])


@pytest.mark.tools
def test_helm_renders_the_values(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(VALUES[0]), "utf-8")
    command = [tool("helm"), "template", "warmroute", ROOT / "helm", "--namespace", "llm", "--values", values]
    rendered = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    kinds = {each["kind"]: each for each in rendered}
    assert kinds["Deployment"]["metadata"]["name"] == "warmroute"
    config = tmp_path / "config.yaml"
    config.write_text(kinds["ConfigMap"]["data"]["config.yaml"], "utf-8")
    assert [source.source for source in load(config, {}, {}).discovery] == ["kubernetes service vllm"]
    assert kinds["Role"]["rules"][0]["resources"] == ["endpointslices"]


def container() -> dict[str, Any]:
    containers: list[dict[str, Any]] = ENGINE[1]["spec"]["template"]["spec"]["containers"]
    return containers[0]
