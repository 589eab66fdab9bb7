"""Builds wheels whose hot modules are compiled to C by mypyc: the same Python, a third of its time. Without a C compiler, and
in an editable installation, everything stays plain Python and works the same.

    python hatch_build.py FOLDER     # the packages, compiled, in a folder of their own: put it on PYTHONPATH to run them

Environment: WARMROUTE_COMPILE=no leaves it out, =require makes it an error if it cannot be done (default: it is tried).
WARMROUTE_OPT_LEVEL: the C compiler's -O, 0 to 3 (default 3; 0 takes a third of the time, for tests).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PACKAGES = ("router", "gateway", "replica")

# The modules that are compiled: those with a share of the bytecodes of a request (`python -m scripts.hot_modules` measures it
# for the three APIs), small ones beside them whose classes and constants they use, and all modules with subclasses of
# compiled classes, because Python cannot subclass those. A new module is plain Python until its path is here. mypyc cannot
# compile msgspec Structs, async generators, or subclasses of classes of aiohttp and logging well: they are in modules of
# their own, which are not here. (A compiled logging.Handler that is freed leaves its weak references behind, and the next
# garbage collection follows them.)
HOT = (
    "router/booking.py",
    "router/index/blocks.py",
    "router/index/holds.py",
    "router/index/paid.py",
    "router/index/tree.py",
    "router/index/trie.py",
    "router/late.py",
    "router/leading.py",
    "router/learning/allowances.py",
    "router/learning/conversations.py",
    "router/learning/evidence.py",
    "router/learning/foreign.py",
    "router/learning/learned.py",
    "router/learning/losses.py",
    "router/learning/objects.py",
    "router/learning/promises.py",
    "router/learning/rates.py",
    "router/learning/scales.py",
    "router/learning/serial.py",
    "router/learning/sessions.py",
    "router/learning/shares.py",
    "router/load.py",
    "router/pricing/cost.py",
    "router/pricing/quotes.py",
    "router/pricing/replication.py",
    "router/residency.py",
    "router/router.py",
    "router/types.py",
    "gateway/accounting/consumed.py",
    "gateway/features/ledger/buffer.py",
    "gateway/accounting/meter.py",
    "gateway/accounting/money.py",
    "gateway/accounting/prices.py",
    "gateway/features/keys/limits/account.py",
    "gateway/features/keys/limits/calendar.py",
    "gateway/features/keys/limits/limiter.py",
    "gateway/features/keys/limits/rate.py",
    "gateway/admission/memory.py",
    "gateway/admission/pool_queue.py",
    "gateway/config/live.py",
    "gateway/features/adoption/interrupted.py",
    "gateway/features/adoption/kept_answer.py",
    "gateway/features/audit/audit.py",
    "gateway/features/audit/auditor.py",
    "gateway/features/audit/claim.py",
    "gateway/features/audit/evidence.py",
    "gateway/features/audit/sent.py",
    "gateway/features/deadlines/deadlines.py",
    "gateway/features/diagnostics/diagnoses.py",
    "gateway/features/disaggregation/bodies.py",
    "gateway/features/disaggregation/forms.py",
    "gateway/features/disaggregation/prefilling.py",
    "gateway/features/translation/adaptation/answers.py",
    "gateway/dialects/answer.py",
    "gateway/dialects/anthropic/answer_edits.py",
    "gateway/dialects/anthropic/billing.py",
    "gateway/dialects/anthropic/message_answer.py",
    "gateway/dialects/anthropic/messages.py",
    "gateway/dialects/anthropic/prompt.py",
    "gateway/dialects/anthropic/sessions.py",
    "gateway/dialects/anthropic/stream.py",
    "gateway/dialects/anthropic/usage.py",
    "gateway/dialects/api_request.py",
    "gateway/dialects/body.py",
    "gateway/dialects/dialect.py",
    "gateway/dialects/events/first_event.py",
    "gateway/dialects/events/named.py",
    "gateway/dialects/events/passed_tokens.py",
    "gateway/dialects/events/reader.py",
    "gateway/dialects/events/splitter.py",
    "gateway/dialects/events/sse.py",
    "gateway/dialects/finished_answer.py",
    "gateway/dialects/json_edits.py",
    "gateway/dialects/lenient.py",
    "gateway/dialects/openai/chat_answer.py",
    "gateway/dialects/openai/continuation.py",
    "gateway/dialects/openai/generations.py",
    "gateway/dialects/openai/request.py",
    "gateway/dialects/openai/stream.py",
    "gateway/dialects/openai/usage.py",
    "gateway/dialects/passthrough.py",
    "gateway/dialects/prompt/calls.py",
    "gateway/dialects/prompt/canonical.py",
    "gateway/dialects/prompt/chat.py",
    "gateway/dialects/prompt/content.py",
    "gateway/dialects/prompt/head.py",
    "gateway/dialects/prompt/marks.py",
    "gateway/dialects/responses/ids.py",
    "gateway/features/histories/held.py",
    "gateway/features/histories/kept.py",
    "gateway/features/prompt_log/log_reader.py",
    "gateway/features/prompt_log/delta/delta_answers.py",
    "gateway/features/prompt_log/delta/delta_form.py",
    "gateway/features/prompt_log/once/request.py",
    "gateway/features/prompt_log/quick_looks.py",
    "gateway/dialects/responses/prompt.py",
    "gateway/dialects/responses/response_answer.py",
    "gateway/dialects/responses/responses.py",
    "gateway/dialects/responses/stream.py",
    "gateway/dialects/responses/usage.py",
    "gateway/dialects/table.py",
    "gateway/features/translation/answers.py",
    "gateway/features/retention/form.py",
    "gateway/features/translation/forms.py",
    "gateway/features/translation/messages/answer.py",
    "gateway/features/translation/messages/echo.py",
    "gateway/features/translation/messages/request.py",
    "gateway/features/translation/messages/stream.py",
    "gateway/features/translation/messages/tools.py",
    "gateway/features/translation/messages/translation.py",
    "gateway/features/translation/messages/turns.py",
    "gateway/features/translation/responses/answer.py",
    "gateway/features/translation/responses/request.py",
    "gateway/features/translation/responses/stream.py",
    "gateway/features/translation/responses/tools.py",
    "gateway/features/translation/responses/translation.py",
    "gateway/features/translation/responses/turns.py",
    "gateway/features/translation/rules.py",
    "gateway/features/translation/translation.py",
    "gateway/dialects/steering.py",
    "gateway/dialects/usage.py",
    "gateway/fleet/breaker.py",
    "gateway/fleet/cache_reports.py",
    "gateway/fleet/directory.py",
    "gateway/fleet/engines.py",
    "gateway/fleet/membership.py",
    "gateway/fleet/places.py",
    "gateway/fleet/refusals.py",
    "gateway/fleet/state.py",
    "gateway/features/keys/grant.py",
    "gateway/features/keys/ring.py",
    "gateway/parser/parsing.py",
    "gateway/request/answer_assembly.py",
    "gateway/request/attempts.py",
    "gateway/features/runs/detached_answer.py",
    "gateway/features/runs/passing.py",
    "gateway/features/runs/run_reply.py",
    "gateway/features/runs/run_request.py",
    "gateway/request/callers.py",
    "gateway/request/client.py",
    "gateway/request/delivery.py",
    "gateway/request/exchange.py",
    "gateway/request/extensions.py",
    "gateway/request/forms.py",
    "gateway/features/responses/recall.py",
    "gateway/request/inflated.py",
    "gateway/request/lifecycle.py",
    "gateway/request/notes.py",
    "gateway/request/observers/access_log.py",
    "gateway/features/ledger/entries.py",
    "gateway/request/phases/admitting.py",
    "gateway/features/keys/callers.py",
    "gateway/request/phases/choosing.py",
    "gateway/request/phases/ending.py",
    "gateway/features/responses/stored_objects.py",
    "gateway/features/keys/limit_phases.py",
    "gateway/request/phases/reading.py",
    "gateway/request/phases/scopes.py",
    "gateway/request/pulses.py",
    "gateway/request/record.py",
    "gateway/request/resumption.py",
    "gateway/request/retries.py",
    "gateway/request/rights.py",
    "gateway/request/running.py",
    "gateway/request/settle.py",
    "gateway/request/slots.py",
    "gateway/request/verdicts.py",
    "gateway/server/access.py",
    "gateway/server/http/connection.py",
    "gateway/server/http/request.py",
    "gateway/server/http/request_head.py",
    "gateway/server/http/response.py",
    "gateway/features/websocket/message_request.py",
    "gateway/features/websocket/message_socket.py",
    "gateway/features/websocket/takeover.py",
    "gateway/features/websocket/tunnel.py",
    "gateway/features/workflows/quick_look.py",
    "gateway/features/workflows/running/origin.py",
    "gateway/features/workflows/running/step_request.py",
    "gateway/telemetry/counters.py",
    "gateway/telemetry/line_format.py",
    "gateway/features/live_page/sums.py",
    "gateway/telemetry/log_output.py",
    "gateway/telemetry/loop_lag.py",
    "gateway/telemetry/metrics.py",
    "gateway/telemetry/request_log.py",
    "gateway/shares.py",
    "gateway/turns.py",
    "gateway/upstream/access/fragile.py",
    "gateway/upstream/backpressure.py",
    "gateway/upstream/client.py",
    "gateway/upstream/connection.py",
    "gateway/upstream/headers.py",
    "gateway/upstream/http1.py",
    "gateway/upstream/loop_guard.py",
    "gateway/upstream/pool.py",
    "gateway/upstream/sending.py",
    "gateway/upstream/timeouts.py",
)

# No cache: it is of no use to mypyc, and a mypy that runs at the same time locks it.
# One C file per module: gcc needs several times as long for one of all modules, and the files are compiled side by side.
_SETUP = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from mypyc.build import mypycify
from setuptools import setup
from setuptools.command.build_ext import build_ext

class BuildInParallel(build_ext):
    def build_extension(self, ext):
        if self.compiler.compiler_type == "unix":  # calls between the modules need no indirection, and can be inlined
            ext.extra_compile_args.append("-fvisibility=hidden")

        def compiled(source):
            return self.compiler.compile(
                [source], self.build_temp, include_dirs=ext.include_dirs, extra_postargs=ext.extra_compile_args
            )
        with ThreadPoolExecutor(jobs) as pool:
            ext.extra_objects = [path for paths in pool.map(compiled, ext.sources) for path in paths]
        ext.sources = []
        super().build_extension(ext)

lib, temp, level, *modules = sys.argv[1:]
jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
sys.argv[1:] = ["--quiet", "build_ext", "--build-lib", lib, "--build-temp", temp, "--parallel", str(jobs)]
options = ["--no-warn-unused-ignores", f"--cache-dir={os.devnull}"]
made = mypycify([*options, *modules], opt_level=level, debug_level="0", target_dir=temp, multi_file=True)
setup(name="warmroute", packages=[], ext_modules=made, cmdclass={"build_ext": BuildInParallel})
"""


def modules() -> Sequence[str]:
    """The modules to compile, as paths below ROOT."""
    return [name for name in HOT if (ROOT / name).is_file()]


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
