"""Real gateways, and real processes that simulate replicas: what other policies are said to find, and what they find."""

from __future__ import annotations

import pytest

from bench.fleet.savings import HASHED, compared, conversations, hashed
from tests.support.tiers import gate

# Tokens of a replica's cache, and by how many points shadows may be off: the order of requests follows from when answers end,
# and these end at other times under another policy. These are few conversations: the bench has more, and several runs.
ROOM_FOR_ALL = (400_000, 3)
ROOM_FOR_SOME = (48_000, 8)


@pytest.mark.parametrize(("kv_tokens", "most"), [ROOM_FOR_ALL, ROOM_FOR_SOME])
@gate("48000-8", reason="less room is the harder case")
async def test_other_policies_find_what_their_shadows_say(kv_tokens: int, most: float) -> None:
    sessions = conversations(60, 3)
    served, shadows = await compared(sessions, kv_tokens)
    error = shadows["actual"] - served
    assert abs(error) < 0.02
    truth, own = await compared(sessions, kv_tokens, policy="round_robin")
    assert abs(own["round_robin"] - truth) < 0.02, "of the very same requests"
    points = {"round_robin": 100 * (shadows["round_robin"] - error - truth)}
    for policy, really in (
        ("least_loaded", (await compared(sessions, kv_tokens, policy="least_loaded"))[0]),
        (HASHED, await hashed(sessions, kv_tokens)),
    ):
        points[policy] = 100 * (shadows[policy] - error - really)
    assert max(map(abs, points.values())) < most, points
    assert served - truth > 0.1, "there is something to be saved"
