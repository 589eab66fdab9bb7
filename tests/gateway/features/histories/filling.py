"""A process that fills an owner's share of a store: `python -m tests.gateway.features.histories.filling URL SEED BYTES`.

It puts turns, frames and refs, deletes and purges, until the store is full a few times; its input's end ends it. Its output
is the number of refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from dataclasses import replace

from gateway.database.database import Database
from gateway.features.histories.records import RefMove, StoreFullError, UnknownObjectError
from gateway.features.histories.sizes import StoredSizes
from gateway.features.histories.tables import TABLES
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock
from tests.gateway.features.histories.test_turns import turn

STEPS, REFUSALS = 200, 5


async def fill(url: str, seed: str, most: int) -> int:
    """Returns the number of refusals."""
    database, clock, chance = Database(url, TABLES), Clock(), random.Random(seed)
    await database.open()
    store = RunStore(database, TTL_S, clock, ResponseRuns(), StoredSizes(100 * most, most))
    store.late_s = 60
    refusals, heads = 0, list[str]()
    try:
        for number in range(STEPS):
            head = f"{seed}-{number}"
            made = replace(turn(f"turn_{head}", head=head), input=b"i" * chance.randrange(2000), created_at=float(number))
            made = replace(made, log=replace(made.log, frame=f"pf1_{chance.randrange(4)}"))
            try:
                await store.put_turn(made, b"f" * 500, ttl_s=chance.choice([10.0, 500.0]), move=RefMove(f"r{number % 7}", []))
                heads.append(head)
            except StoreFullError:
                refusals += 1
                if refusals == REFUSALS:
                    break
                clock.now += 20
                await store.purge()
                for _ in range(len(heads) // 2):
                    await store.delete_turns("o", heads.pop(chance.randrange(len(heads))), tree=False)
            if chance.random() < 0.05:
                with contextlib.suppress(UnknownObjectError):
                    await store.delete_ref("o", f"r{chance.randrange(7)}")
    finally:
        await store.close()
    return refusals


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(fill(sys.argv[1], sys.argv[2], int(sys.argv[3])))}\n")
