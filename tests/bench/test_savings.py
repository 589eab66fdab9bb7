"""Real gateways, and real processes that simulate replicas: what round robin is said to find, and what it finds."""

from __future__ import annotations

from bench.fleet.savings import conversations, run


async def test_round_robin_finds_what_its_shadows_say() -> None:
    sessions = conversations(60, 3)
    served, shadows = await run("cost", sessions, 200_000, 1)
    truth, nothing = await run("round_robin", sessions, 200_000, 1)
    assert not nothing
    assert abs(shadows["actual"] - served) < 0.02
    assert abs(shadows["round_robin"] - (shadows["actual"] - served) - truth) < 0.02
    assert served - truth > 0.1, "there is something to be saved"
