"""Where and with what a report was made."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.policies import commit
from gateway import __version__


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
