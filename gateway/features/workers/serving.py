"""`warmroute serve` with several workers: this process supervises them."""

from __future__ import annotations

from functools import partial

from gateway.commands.serving import ServeResources
from gateway.features.snapshots.keeper import file_of
from gateway.features.workers.supervisor import Supervisor


async def serve(what: ServeResources) -> None:
    """Runs until a signal ends it. Raises OSError, StartError."""
    supervisor = Supervisor(what.config, what.source, sides=what.sides, snapshot=file_of(what.config))
    started = partial(what.started, supervisor, supervisor.hub.replica_urls)
    await supervisor.run(what.ending.stop, what.ending.hurry, started)
