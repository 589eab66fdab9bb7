"""A file mounted like a Kubernetes ConfigMap: a link through a linked folder, which is replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path


class ConfigMap:
    """`path` is the path of the file. `swap` replaces its contents."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0
        self.path = folder / "config.yaml"
        self.path.symlink_to("..data/config.yaml")

    def swap(self, text: str) -> None:
        self._version += 1
        version = self._folder / f"..v{self._version}"
        version.mkdir()
        (version / "config.yaml").write_text(text)
        (self._folder / "..fresh").symlink_to(version.name)
        os.replace(self._folder / "..fresh", self._folder / "..data")
