"""Features in a copy of the tree: each one taken out, with those that use it, and a toy put in as one folder and one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.features.table import FEATURES
from gateway.telemetry.metrics import Metrics
from tests import test_layers as layers
from tests.support.composed import SECTIONS
from tests.support.paths import ROOT
from tests.support.tiers import nightly

PACKAGES = sorted(path.name for path in (ROOT / "gateway" / "features").iterdir() if (path / "__init__.py").exists())
CORE_TESTS = ["accounting", "admission", "fleet/test_prober.py", "request/test_attempts.py", "request/test_lifecycle.py"]

TOY = {
    "__init__": '"""A toy."""\n',
    "declaration": '''
"""Refuses requests of one tenant, counts those of the others, and asks all processes for the counts."""

from typing import Annotated

from msgspec import Meta

from gateway.config.hints import FIXED
from gateway.config.kinds import ConfigSection
from gateway.config.sections import Section
from gateway.features.declaring import Command, Feature


class ToyConfig(ConfigSection, frozen=True):
    """Whom it refuses."""

    refuses: str = ""


class ToyMetrics:
    def __init__(self, make) -> None:
        self.refused = make.counter("toys_refused_total", "Requests that were refused.")


TOY = Section("toy", Annotated[ToyConfig, Meta(extra={FIXED: True})], ToyConfig())
FEATURE = Feature(
    wanted=lambda config: TOY.of(config).refuses,
    section=TOY,
    metrics=ToyMetrics,
    commands=[Command("toy", "say who is refused", "gateway.features.toy.command")],
)
''',
    "command": '''
"""`warmroute toy`: prints who is refused."""

from pathlib import Path

from gateway.features.table import read
from gateway.features.toy.declaration import TOY

DESCRIPTION = "Say who is refused."


def add_arguments(parser):
    parser.add_argument("file", type=Path)


def run(options):
    print(TOY.of(read(options.file, {}).config).refuses)
    return 0
''',
    "feature": '''
"""Adds the toy to a gateway."""

import json

from gateway.core import Core
from gateway.errors import GatewayError
from gateway.features.toy.declaration import TOY, ToyMetrics
from gateway.request.slots import Slot
from gateway.server.routing import Response, get

SEEN = Slot[int]("toy")


def install(core: Core) -> None:
    counts, refused = [], TOY.of(core.config).refuses

    def enter(exchange) -> None:
        if exchange.caller.tenant == refused:
            core.metrics.of(ToyMetrics).refused.add()
            raise GatewayError(418, "teapot", f"Not for {refused}.")
        SEEN.set(exchange.record, len(counts) + 1)

    def settled(record) -> None:
        if SEEN.get(record) is not None:
            counts.append((SEEN.get(record), record.sender.tenant))

    def endpoints(operator, local, control):
        async def toy(request):
            operator.allow(request)
            answers = await control.ask("toy")
            return Response(b"".join(answers.values()))

        return [get("/warmroute/toy", toy)]

    core.extensions.entering.append(enter)
    core.observers.append(settled)
    core.endpoints.append(endpoints)
    core.topics.answers("toy", lambda _question: json.dumps(counts).encode())
''',
}
TRY_TOY = """
import asyncio, contextlib, io, pathlib
from gateway.commands import cli
from tests.gateway.conftest import running
from tests.support.fakes import FakeReplica

async def main():
    async with FakeReplica() as replica, running(replica, toy={"refuses": "nobody"}) as run:
        for tenant, status in (("a", 200), ("nobody", 418), ("b", 200)):
            assert (await run.post(headers={"X-Tenant-Id": tenant}))[0] == status
        assert (await run.get("/warmroute/toy"))[2] == b'[[1, "a"], [2, "b"]]'
        assert b"warmroute_toys_refused_total 1.0" in (await run.get("/metrics"))[2]

asyncio.run(main())
path = pathlib.Path("toy.yaml")
path.write_text("pools: [{replicas: [http://r:1]}]\\ntoy: {refuses: nobody}\\n")
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert cli.main(["toy", str(path)]) == 0
assert out.getvalue() == "nobody\\n"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the core of a gateway consists of, and its features; with their bytecode, which is valid for the copy."""
    for package in ("gateway", "router"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


def without(tree: Path, names: set[str]) -> None:
    """Take features out: their folders, and their lines in the table."""
    for name in names:
        shutil.rmtree(tree / "gateway" / "features" / name)
    table = tree / "gateway" / "features" / "table.py"
    kept = [line for line in table.read_text("utf-8").splitlines() if line.strip(' ",') not in names]
    table.write_text("\n".join(kept) + "\n", "utf-8")


def passes(tree: Path, *program: str, within_s: float = 120) -> str:
    """What the program writes."""
    env = {**os.environ, "PYTHONPATH": f"{tree}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *program], cwd=tree, env=env, text=True, capture_output=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics_of(names: set[str]) -> set[str]:
    """The names of the metrics that only these features have."""
    kinds = [FEATURES[name].metrics for name in names & FEATURES.keys()]
    own = {each.name for each in Metrics([kind for kind in kinds if kind is not None]).instruments.all}
    return own - {each.name for each in Metrics().instruments.all}


@pytest.mark.parametrize("names", [*PACKAGES, " ".join(PACKAGES)], ids=[*PACKAGES, "all"])
def test_without_a_feature_the_core_serves_requests(tree: Path, names: str) -> None:
    gone = {*names.split()}
    while users := {user for user, used in layers.USES.items() if used & gone} - gone:
        gone |= users
    without(tree, gone)
    left = json.loads(passes(tree, "-m", "tests.support.composed", *gone))
    assert not metrics_of(gone) & {*left["metrics"]}
    assert not {command.name for each in gone & FEATURES.keys() for command in FEATURES[each].commands} & {*left["commands"]}


@pytest.mark.timeout(850)
@nightly("test_without_a_feature_the_core_serves_requests")
def test_without_features_the_core_passes_its_tests(tree: Path) -> None:
    """But for those that name a feature: an API that is translated, a section, a fallback pool."""
    shutil.copytree(ROOT / "tests", tree / "tests")
    shutil.copy(ROOT / "pyproject.toml", tree)
    without(tree, {*PACKAGES})
    files = [f"tests/gateway/{path}" for path in CORE_TESTS]
    passes(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *files, within_s=800)


def test_each_section_of_a_feature_is_tried() -> None:
    assert SECTIONS.keys() == {name for name, feature in FEATURES.items() if feature.section is not None}


def test_a_feature_is_one_folder_and_one_line(tree: Path) -> None:
    toy = tree / "gateway" / "features" / "toy"
    toy.mkdir()
    for name, text in TOY.items():
        (toy / f"{name}.py").write_text(text, "utf-8")
    table = tree / "gateway" / "features" / "table.py"
    text = table.read_text("utf-8")
    table.write_text(text.replace("NAMES: Final = [\n", 'NAMES: Final = [\n    "toy",\n'), "utf-8")
    passes(tree, "-c", TRY_TOY)
