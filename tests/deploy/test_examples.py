"""helm/examples: the chart takes each file, Kubernetes takes what comes of it, the gateway its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from replica.flags import parser
from tests.deploy.helm import CHART, Helm, validate
from tests.support.configs import load

FOLDER = CHART / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))

pytestmark = pytest.mark.tools


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return values


def test_each_example_is_on_the_page() -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    assert EXAMPLES
    assert [path.name for path in EXAMPLES if f"({path.name})" not in page] == []


def test_it_lints(helm: Helm, example: Path) -> None:
    done = helm.run("lint", "--strict", str(CHART), "--values", str(example))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_kubernetes_and_the_gateway_accept_what_it_renders(helm: Helm, example: Path, tmp_path: Path) -> None:
    objects = helm.objects(read(example))
    for item in objects.values():
        validate(item)
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap"]["data"]["config.yaml"], "utf-8")
    assert load(file, {}, {}).discovery


def test_a_valkey_asks_for_a_password(helm: Helm, example: Path) -> None:
    objects = helm.objects(read(example))
    shared = "Deployment of valkey" in objects
    (gateway,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert shared is any(each["name"] == "WARMROUTE_SHARING_PASSWORD" for each in gateway.get("env", ()))


def test_the_demo_needs_no_engine_s_image(helm: Helm) -> None:
    objects = helm.objects(read(FOLDER / "cpu-demo.yaml"))
    (engine,) = objects["StatefulSet of replicas"]["spec"]["template"]["spec"]["containers"]
    (gateway,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert engine["image"] == gateway["image"]
    assert engine["command"][:2] == ["warmroute", "replica"]
    options = parser().parse_args(engine["command"][2:])
    (model,) = read(FOLDER / "cpu-demo.yaml")["config"]["prices"]
    assert (options.engine, options.host, options.port, options.served_model_name) == ("sim", "0.0.0.0", 8000, model)


@pytest.mark.parametrize(
    ("name", "flag"), [("vllm-two", "--enable-prompt-tokens-details"), ("sglang", "--enable-cache-report")]
)
def test_cached_tokens_are_visible(helm: Helm, name: str, flag: str) -> None:
    (engine,) = helm.objects(read(FOLDER / f"{name}.yaml"))["StatefulSet of replicas"]["spec"]["template"]["spec"]["containers"]
    assert flag in engine["command"]
