"""Compiler hints for classes. `mypy_extensions` is installed where wheels are compiled; plain Python ignores the hints."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        return lambda made: made
