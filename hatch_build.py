"""Builds wheels whose hot modules are compiled to C by mypyc: the same Python, a third of its time. Without a C compiler, and
in an editable installation, everything stays plain Python and works the same.

    python hatch_build.py FOLDER     # the packages, compiled, in a folder of their own: put it on PYTHONPATH to run them

Environment: WARMROUTE_COMPILE=no leaves it out, =require makes it an error if it cannot be done (default: it is tried).
WARMROUTE_OPT_LEVEL: the C compiler's -O, 0 to 3 (default 3; 0 takes a third of the time, for tests of the build itself).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PACKAGES = ("router", "gateway", "replica")

# Files, and folders with all that is in them, that are not compiled: they are not on the hot path of a request, or mypyc cannot
# compile them correctly (msgspec Structs, async generators, subclasses of aiohttp's or logging's classes).
# (telemetry/logs: a compiled logging.Handler that is freed leaves its weak references behind, and the next garbage collection
# follows them.)
PLAIN = (
    "gateway/features/doctor/endpoints.py",
    "gateway/features/doctor/examiner.py",
    "gateway/features/ledger/batches.py",
    "gateway/features/ledger/ledger.py",
    "gateway/features/ledger/migrations.py",
    "gateway/features/ledger/queries.py",
    "gateway/features/ledger/store.py",
    "gateway/features/ledger/sums.py",
    "gateway/features/ledger/tables.py",
    "gateway/admission/fair_queue.py",
    "gateway/admission/pool_queue.py",
    "gateway/__main__.py",
    "gateway/app.py",
    "gateway/core.py",
    "gateway/cluster/accepted.py",
    "gateway/cluster/commands.py",
    "gateway/cluster/listeners.py",
    "gateway/cluster/messages.py",
    "gateway/cluster/process.py",
    "gateway/cluster/side_sockets.py",
    "gateway/cluster/outside.py",
    "gateway/features/snapshots/",
    "gateway/features/sharing/",
    "gateway/features/workers/command_log.py",
    "gateway/features/workers/handover.py",
    "gateway/features/workers/hub.py",
    "gateway/features/workers/hub_knowledge.py",
    "gateway/features/workers/messages.py",
    "gateway/features/workers/questions.py",
    "gateway/features/workers/supervisor.py",
    "gateway/commands/",
    "gateway/features/doctor/command",
    "gateway/features/keys/command",
    "gateway/features/ledger/command",
    "gateway/features/recording/command",
    "gateway/config/addresses.py",
    "gateway/config/checks.py",
    "gateway/config/complaints.py",
    "gateway/config/hints.py",
    "gateway/config/json_schema.py",
    "gateway/config/listen.py",
    "gateway/config/parse.py",
    "gateway/config/schema.py",
    "gateway/config/source.py",
    "gateway/config/yaml_file.py",
    "gateway/database/",
    "gateway/fleet/engine_client.py",
    "gateway/fleet/engines.py",
    "gateway/fleet/prober.py",
    "gateway/features/discovery/",
    "gateway/fleet/state.py",
    "gateway/features/keys/file.py",
    "gateway/features/keys/keys.py",
    "gateway/features/keys/record.py",
    "gateway/features/keys/store.py",
    "gateway/features/keys/tables.py",
    "gateway/features/keys/tokens/fetching.py",
    "gateway/features/keys/tokens/issuer.py",
    "gateway/features/keys/tokens/jwks.py",
    "gateway/features/keys/tokens/verifying.py",
    "gateway/parser/helper.py",
    "gateway/features/histories/",
    "gateway/tasks.py",
    "gateway/parser/process.py",
    "gateway/parser/wire.py",
    "gateway/request/slots.py",
    "gateway/server/aiohttp_seam.py",
    "gateway/server/endpoints.py",
    "gateway/server/fallback/server.py",
    "gateway/server/http/accept.py",
    "gateway/server/http/ambiguity.py",
    "gateway/server/http/bounded_parser.py",
    "gateway/server/http/connection.py",
    "gateway/server/http/connections.py",
    "gateway/server/http/half_closed.py",
    "gateway/features/keys/endpoints.py",
    "gateway/features/keys/used.py",
    "gateway/features/keys/spending.py",
    "gateway/server/models.py",
    "gateway/server/operator.py",
    "gateway/server/replica_rows.py",
    "gateway/server/side_listeners.py",
    "gateway/server/status.py",
    "gateway/features/live_page/",
    "gateway/features/live_page/merging.py",
    "gateway/telemetry/logs.py",
    "gateway/features/tracing/exporter.py",
    "gateway/features/tracing/otlp.py",
    "gateway/features/tracing/posting.py",
    "replica/",
    "router/events.py",
    "router/native.py",
    "router/policies/",
    "router/simulation/",
    "router/snapshot/records.py",
)

# No cache: it is of no use to mypyc, and a mypy that runs at the same time locks it.
_SETUP = """
import os, sys
from mypyc.build import mypycify
from setuptools import setup
lib, temp, level, *modules = sys.argv[1:]
sys.argv[1:] = ["--quiet", "build_ext", "--build-lib", lib, "--build-temp", temp]
made = mypycify(["--no-warn-unused-ignores", f"--cache-dir={os.devnull}", *modules], opt_level=level, target_dir=temp)
setup(name="warmroute", packages=[], ext_modules=made)
"""


def modules() -> Iterator[str]:
    """The modules to compile, as paths below ROOT."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if path.name != "__init__.py" and not name.startswith(PLAIN):
                yield name


def compile_into(folder: Path) -> list[Path]:
    """Compile into `folder`; returns the extension modules, each at its place below it. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as temp:
        level = os.environ.get("WARMROUTE_OPT_LEVEL", "3")
        command = [sys.executable, "-c", _SETUP, str(folder), temp, level, *modules()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return sorted(folder.rglob("*.so"))


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    for package in PACKAGES:
        shutil.rmtree(folder / package, ignore_errors=True)
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    print(f"{len(compile_into(folder))} compiled modules in {folder}")
    return 0


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # not in a build: only `main` is wanted
    BuildHookInterface = object


class Compile(BuildHookInterface):  # type: ignore[misc, valid-type, unused-ignore]
    """Hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("WARMROUTE_COMPILE", "try")
        if self.target_name != "wheel" or version == "editable" or wish == "no":
            return
        self._folder = tempfile.TemporaryDirectory()
        try:
            made = compile_into(Path(self._folder.name))
        except (OSError, subprocess.CalledProcessError) as error:
            if wish == "require":
                raise
            self.app.display_warning(f"warmroute is not compiled, and slower for it: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in made:
            build_data["force_include"][str(path)] = path.relative_to(self._folder.name).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
