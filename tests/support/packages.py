"""The files in the project's packages, as packed by their builder."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Literal

from tests.support.paths import ROOT

Kind = Literal["wheel", "sdist"]


def packed(kind: Kind, folder: Path) -> set[str]:
    """The files of a package, uncompiled, by their paths in the project. folder: where it is built."""
    script = f"import hatchling.build as build; print(build.build_{kind}({str(folder)!r}))"
    environment = {"PATH": "/usr/bin:/bin", "WARMROUTE_COMPILE": "no", "HOME": str(folder)}
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    path = folder / made.stdout.split()[-1]
    if kind == "wheel":
        with zipfile.ZipFile(path) as wheel:
            return set(wheel.namelist())
    with tarfile.open(path) as archive:
        return {name.split("/", 1)[-1] for name in archive.getnames()}
