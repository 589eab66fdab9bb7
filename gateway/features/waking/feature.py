"""Sleeping engines are woken when all others of their pool are full."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.waking.waker import Waker


def install(core: Core) -> None:
    waker = Waker(core.fleet, core.upstream)
    core.put(waker)
    core.extensions.entering.append(waker.entering)
    core.work.sweeps.append(waker.sweep)
    core.work.closes.append(waker.close)
