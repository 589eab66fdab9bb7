"""The Dockerfile without a Docker engine: its instructions, and its build steps run in scratch folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
import yaml

from tests.support.tools import ROOT, missing

# The folders of the image that the build steps write, and the scratch folders that stand for them here.
IMAGE_FOLDERS = ("/wheels", "/opt/warmroute", "/var/lib/warmroute")


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments), without comments, long lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def last(instructions: list[tuple[str, str]], word: str) -> str:
    return next(arguments for found, arguments in reversed(instructions) if found == word)


def copied(instructions: list[tuple[str, str]]) -> list[str]:
    """What is copied from the repository, in the first stage."""
    copies = [arguments.split() for word, arguments in instructions if word == "COPY" and not arguments.startswith("--from")]
    return [source for *sources, _ in copies for source in sources]


def allowed() -> set[str]:
    """The top-level names that .dockerignore lets through; it starts by keeping everything out."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    return {rule[1:] for rule in rules if rule.startswith("!")}


def test_runs_as_a_user_without_rights(instructions: list[tuple[str, str]]) -> None:
    words = [word for word, _ in instructions]
    assert last(instructions, "USER") == "65532:65532"
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])  # what runs is not its own to change


def test_both_stages_have_the_same_slim_python(instructions: list[tuple[str, str]]) -> None:
    images = [arguments.split()[0] for word, arguments in instructions if word == "FROM"]
    assert images == ["python:3.11-slim"] * 2  # the virtual environment of the first runs in the second


def test_the_image_and_the_chart_agree(instructions: list[tuple[str, str]], root: Path) -> None:
    templates = root / "helm" / "templates"
    deployment = (templates / "deployment.yaml").read_text("utf-8")
    (command,) = re.findall(r"^ +command: (\[warmroute.*\])$", deployment, re.MULTILINE)
    (port,) = re.findall(r'define "warmroute.port" -\}\}(\d+)', (templates / "_helpers.tpl").read_text("utf-8"))
    assert json.loads(last(instructions, "ENTRYPOINT")) + json.loads(last(instructions, "CMD")) == yaml.safe_load(command)
    assert last(instructions, "EXPOSE") == port
    assert f"WARMROUTE_LISTEN=0.0.0.0:{port}" in last(instructions, "ENV")
    assert f"runAsUser: {last(instructions, 'USER').partition(':')[0]}" in deployment


def test_what_is_copied_exists_and_is_not_ignored(instructions: list[tuple[str, str]]) -> None:
    assert [source for source in copied(instructions) if not (ROOT / source).exists()] == []
    assert set(copied(instructions)) == allowed()


@pytest.mark.image
@pytest.mark.tools
@pytest.mark.timeout(1800)  # it downloads packages
def test_the_build_steps_give_a_working_command(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    """The RUN lines as they are, on nothing but the copied files; needs pip's network for the dependencies.

    Compiled without optimisation, which takes most of the time: what compiled code does is `make test-compiled`'s to show.
    """
    source = tmp_path / "src"
    source.mkdir()
    for name in copied(instructions):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    image = tmp_path / "python"  # of the image: nothing is installed there, which a compilation could find
    venv.create(image, with_pip=True)
    (tmp_path / "var" / "lib").mkdir(parents=True)
    for word, arguments in instructions:
        if word == "RUN" and not arguments.startswith("apt-get"):  # a C compiler; here it is there, or the build fails
            build_step(re.sub("|".join(IMAGE_FOLDERS), rf"{tmp_path}\g<0>", arguments), source, image / "bin")
    warmroute = tmp_path / "opt" / "warmroute" / "bin" / "warmroute"
    assert run(warmroute, "--version") == "warmroute 0.1.0\n"
    python = warmroute.with_name("python")
    assert run(python, "-c", "import redis.asyncio, hiredis; print('there')") == "there\n", "sharing.url"
    assert run(python, "-c", "import gateway.app, importlib.util; print(importlib.util.find_spec('torch'))") == "None\n"
    assert run(python, "-c", "import asyncpg; print('there')") == "there\n", "state.url: postgresql://"
    traces = "import gateway.features.tracing.otlp as otlp; print(otlp.is_installed())"
    assert run(python, "-c", traces) == "True\n", "tracing.endpoint"
    assert run(python, "-c", "import router.index.trie as trie; print(trie.__file__)").endswith(".so\n"), "it is compiled"


def build_step(command: str, folder: Path, programs: Path) -> None:
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**outside_environment(), "PATH": path, "WARMROUTE_OPT_LEVEL": "0"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if "Could not find a version" in done.stderr:
        missing("pip cannot reach a package index")
    assert done.returncode == 0, done.stderr


def outside_environment() -> dict[str, str]:
    """Without what would let a program find the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(program: Path, *arguments: str) -> str:
    """What the installed program prints, away from the checkout so that nothing of it is found."""
    command = [program, *arguments]
    return subprocess.run(command, cwd="/", env=outside_environment(), capture_output=True, text=True, check=True).stdout
