"""Real gateways, and real processes that simulate replicas: what other policies are said to find, and what they find."""

from __future__ import annotations

import pytest

from bench.fleet.savings import OTHERS, compared, conversations, really

# Tokens of a replica's cache, and by how many points shadows may be off: round robin's, and the others', whose choices follow
# from when answers end, and these end at other times there. These are few conversations: the bench has more, and several runs.
ROOM_FOR_ALL = (400_000, 2, 3)
ROOM_FOR_SOME = (48_000, 4, 8)


@pytest.mark.parametrize(("kv_tokens", "most", "most_of_others"), [ROOM_FOR_ALL, ROOM_FOR_SOME])
async def test_other_policies_find_what_their_shadows_say(kv_tokens: int, most: float, most_of_others: float) -> None:
    sessions = conversations(60, 3)
    served, shadows = await compared(sessions, kv_tokens)
    error = shadows["actual"] - served
    assert abs(error) < 0.02
    truths = {policy: await really(policy, sessions, kv_tokens) for policy in OTHERS}
    points = {policy: 100 * (shadows[policy] - error - truth) for policy, truth in truths.items()}
    assert abs(points["round_robin"]) < most, points
    assert max(map(abs, points.values())) < most_of_others, points
    assert served - truths["round_robin"] > 0.1, "there is something to be saved"
