"""The machine and versions of a report, its destination, and the location of recorded traces."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway import __version__

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "bench" / "reports"


def trace_folder() -> Path:
    """The folder of the recorded traces, which need not exist."""
    return Path(os.environ.get("WARMROUTE_TRACES") or ROOT.parent / "shared" / "traces")


def commit() -> str:
    """The state of the checkout, where there is one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not a checkout"


def command(module: str, arguments: Sequence[str] | None) -> str:
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)])


def versions(libraries: Sequence[str] = ()) -> str:
    """One line: ours, Python's, the libraries' ("name version"), the machine's."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return ", ".join((f"warmroute {__version__} ({commit()})", python, *libraries, f"{os.cpu_count()} x {processor()}"))


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
