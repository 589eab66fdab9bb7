"""scripts/release.sh: the steps that need no engine of containers, in a copy of what they read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from bench.measure.ports import free_port
from tests.deploy.processes import answers, running
from tests.support.tools import ROOT, missing, tool

COPIED = ("scripts/release.sh", "pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("helm", "dashboards", "rules", "gateway", "router", "replica")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    where = tmp_path / "copy"
    (where / "scripts").mkdir(parents=True)
    for name in COPIED:
        shutil.copy(ROOT / name, where / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, where / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return where


def release(where: Path, *steps: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    own = {"HELM": tool("helm"), "HOME": where, "HELM_CACHE_HOME": where, "HELM_CONFIG_HOME": where}
    everything: Mapping[str, str | Path] = {**os.environ, **own, **environment}
    command = [where / "scripts" / "release.sh", *steps]
    return subprocess.run(command, env=everything, capture_output=True, text=True, check=False)


@pytest.mark.tools
@pytest.mark.parametrize("name", ["helm", "helm3"])
def test_the_chart_is_packaged_and_has_a_sum(copy: Path, name: str) -> None:
    (copy / "dist").mkdir()
    for old in (
        "warmroute-0.0.9.tgz",
        "warmroute-0.1.0.post1.tar.gz",
        "warmroute-0.0.9-py3-none-any.whl",
        "warmroute-0x1.0.tgz",
    ):
        (copy / "dist" / old).write_text("of another release", "utf-8")
    done = release(copy, "chart", "sums", HELM=tool(name))
    assert done.returncode == 0, done.stderr
    said = ["release: dist/warmroute-0.1.0.tgz", "release: dist/SHA256SUMS"]
    assert (done.stdout.splitlines(), done.stderr) == (said, "")
    package = copy / "dist" / "warmroute-0.1.0.tgz"
    with tarfile.open(package) as made:
        names = made.getnames()
    assert {
        "warmroute/rules/warmroute.yaml",
        "warmroute/dashboards/warmroute-money.json",
        "warmroute/files/connection.py",
    } <= set(names)
    assert not [name for name in names if "examples" in name]
    assert (copy / "dist" / "SHA256SUMS").read_text("utf-8").split() == [
        hashlib.sha256(package.read_bytes()).hexdigest(),
        package.name,
    ]


@pytest.mark.tools
@pytest.mark.parametrize("name", ["helm", "helm3"])
def test_the_chart_is_installed_from_the_registry_that_it_is_pushed_to(copy: Path, name: str, tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "registry.yaml"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    config.write_text(yaml.safe_dump({"version": 0.1, "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}}), "utf-8")
    serve = [str(tool("docker-registry")), "serve", str(config)]
    with running(serve, tmp_path / "registry.log", lambda: answers(f"http://127.0.0.1:{port}/v2/")):
        done = release(copy, "push", HELM=tool(name), REGISTRY=f"127.0.0.1:{port}", PUSH_FLAGS="--plain-http")
        assert done.returncode == 0, done.stderr
        url = f"oci://127.0.0.1:{port}/charts/warmroute"
        template = [
            tool(name),
            "template",
            "x",
            url,
            "--version",
            "0.1.0",
            "--plain-http",
            "--set",
            "config.discovery[0].dns=_a._b.c",
        ]
        rendered = subprocess.run(
            template, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        assert "kind: Deployment" in rendered.stdout


@pytest.mark.tools
def test_why_a_chart_is_refused_is_said(copy: Path) -> None:
    template = copy / "helm" / "templates" / "service.yaml"
    template.write_text("{{ .Values.unclosed", "utf-8")
    done = release(copy, "chart")
    assert done.returncode == 1
    assert "unclosed action" in done.stdout + done.stderr
    assert "failed" in done.stderr


@pytest.mark.tools
def test_nothing_is_made_of_two_versions(copy: Path) -> None:
    chart = copy / "helm" / "Chart.yaml"
    chart.write_text(chart.read_text("utf-8").replace("version: 0.1.0", "version: 0.2.0"), "utf-8")
    done = release(copy, "chart")
    assert done.returncode == 1
    assert "helm/Chart.yaml has another version than pyproject.toml (0.1.0)" in done.stderr
    assert not list(copy.glob("dist/*"))


@pytest.mark.tools
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("wheelz", "unknown step 'wheelz'"),
        ("image", "image: set REGISTRY"),
        ("push", "push: set REGISTRY"),
    ],
)
def test_what_cannot_be_done_is_said(copy: Path, step: str, message: str) -> None:
    done = release(copy, step, REGISTRY="")
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.image
@pytest.mark.tools
@pytest.mark.timeout(1800)  # it downloads packages
def test_the_wheel_is_installed_and_its_parts_are_listed(copy: Path) -> None:
    """Not compiled: test_dockerfile.py does that."""
    (copy / "dist").mkdir()
    for stale in ("warmroute-0.1.0.tar.gz", "warmroute-0.1.0-cp39-cp39-win_amd64.whl"):
        (copy / "dist" / stale).write_text("of other sources, or for another machine", "utf-8")
    done = release(copy, "sbom", WARMROUTE_COMPILE="no")
    if "pip could not install" in done.stderr:
        missing("pip cannot reach a package index")
    assert done.returncode == 0, done.stderr
    dist = copy / "dist"
    listed = json.loads((dist / "warmroute-0.1.0.cdx.json").read_text("utf-8"))
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == ("CycloneDX", "warmroute")
    names = {each["name"].lower().replace("_", "-") for each in listed["components"]}
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8").partition("\ndependencies = [")[2].partition("\n]")[0]
    wanted = set(re.findall(r'^    "([\w-]+)', pyproject, re.MULTILINE))
    assert wanted
    (extras,) = re.findall(r"\[([\w,]+)\]", (ROOT / "Dockerfile").read_text("utf-8"))
    script = (ROOT / "scripts" / "release.sh").read_text("utf-8")
    assert f"\nEXTRAS={extras} " in script, "the image has other extras than what is listed"
    assert wanted | {"asyncpg", "redis", "pyjwt"} <= names, "dependencies, and those of the extras that the image has"
    assert not names & {"pip", "setuptools", "pytest", "torch"}
