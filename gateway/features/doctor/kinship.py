"""Whether a prompt should have continued an earlier one, where it leaves it, and what that costs.

Two prompts that differ are no broken prefix by themselves: different conversations share a head, sub-agents run beside their
parent in one session, a user edits the last message and asks again. A break needs evidence that the earlier prompt's work would
have been of use, which is that *something behind the difference is the same in both*:

    a volatile text in the head             what follows it in the head is the same; the conversation may be another one
    tools in another order                  the same set
    a volatile text in a later turn         at least another turn behind it is the same
    model, adapter, salt, tools, system     the turns of the earlier prompt begin this one: it is the same conversation
    rewritten history                       turns behind the difference are the same
    truncated history                       the same, and the first of them has moved up
    compaction                              a shorter history that begins like a summary, of the same session or with turns of
                                            the earlier prompt; or half of it, with turns of the same session

`reusable` is how much of the prompt the earlier one would have given, had the difference not been: the bytes that are the same
in both (for a compaction: those of the shorter prompt, for nothing is the same). What was lost is that less what was found all
the same (`examination.py`). Prompts of which only keys are known (recorded traces) are compared by their lengths, within one
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.dialects.prompt.segments import TEXT, Segment
from gateway.features.doctor.causes import COMPACTION, HISTORY_REWRITTEN, HISTORY_TRUNCATED, TOOLS_REORDERED
from gateway.features.doctor.differences import Difference, first_difference
from gateway.features.doctor.observed import ASSISTANT, ObservedRequest, answers_in, common_blocks

MIN_SHARED: Final = 512  # bytes of turns that are the same in both, as evidence
MIN_TURN: Final = 64  # bytes of a turn that counts: "ok" and "yes" are in every conversation
MIN_CONVERSATION: Final = 1024  # bytes of turns that make two prompts one conversation where no session is named
MIN_COMPACTED: Final = 4  # turns of a conversation that is worth a compaction
EARLY: Final = 4  # turns among which a summary stands


class Break(NamedTuple):
    """The prompt leaves an earlier one. reusable: see the top of this file, in units."""

    before: ObservedRequest
    difference: Difference
    reusable: int


def continues(now: ObservedRequest, before: ObservedRequest) -> bool:
    """Whether it is the next request of the same conversation: all of the earlier prompt, and one more answer at most. Where
    answers cannot be counted: the earlier prompt is half of it, or more.
    """
    if now.units < before.units or now.tenant != before.tenant:
        return False
    if not now.outline:
        return _same_thread(now, before) and common_blocks(now, before) == before.blocks and 2 * before.units >= now.units
    if not before.body or first_difference(now, before) is not None:
        return False
    added = now.turns[len(before.turns) :]
    return answers_in(added) <= 1 if now.body[0].name != TEXT else 2 * before.units >= now.units


def compare(now: ObservedRequest, before: ObservedRequest) -> Break | None:
    """None: there is no evidence of a break. O(segments)."""
    if bool(now.outline) != bool(before.outline) or now.tenant != before.tenant:
        return None
    if not now.outline:
        return _by_keys(now, before)
    found = first_difference(now, before)
    if found is None:
        return None
    if found.turn >= 0 and not found.volatile and found.cause == HISTORY_REWRITTEN:
        return _in_history(now, before, found)
    loose, same = _loosely_common(now, before), _same_conversation(now, before)
    if found.volatile or found.cause == TOOLS_REORDERED:
        if found.turn >= max(now.lead, before.lead):
            behind = sum([each.size for each in now.turns[found.turn + 1 : loose]])
            if _strangers(now, before) or behind < MIN_SHARED:
                return None
        if loose >= 0:
            return Break(before, found, now.end_of(loose))
    return Break(before, found, now.end_of(now.lead + same)) if same else None


def _strangers(now: ObservedRequest, before: ObservedRequest) -> bool:
    """Whether they name different sessions."""
    return bool(now.session and before.session) and now.session != before.session


def _loosely_common(now: ObservedRequest, before: ObservedRequest) -> int:
    """How many turns both begin with, volatile texts aside; -1: not even their heads are the same."""
    if sorted(each.loose for each in now.tools) != sorted(each.loose for each in before.tools):
        return -1
    if [each.loose for each in now.fields] != [each.loose for each in before.fields]:
        return -1
    return _equal(now.turns, before.turns)


def _equal(now: Sequence[Segment], before: Sequence[Segment]) -> int:
    count = 0
    for one, other in zip(now, before, strict=False):
        if one.loose != other.loose:
            break
        count += 1
    return count


def _same_conversation(now: ObservedRequest, before: ObservedRequest) -> int:
    """How many turns behind the system prompt both begin with, if that makes them one conversation; else 0."""
    if _strangers(now, before):
        return 0
    same = _equal(now.body, before.body)
    grown = same == len(before.body) < len(now.body)
    if now.session and now.session == before.session and same and (grown or same > 1):
        return same
    if same > 1 and sum([each.size for each in now.body[:same]]) >= MIN_CONVERSATION:
        return same
    return 0


def _in_history(now: ObservedRequest, before: ObservedRequest, found: Difference) -> Break | None:
    if _strangers(now, before):
        return None
    first = found.turn
    later = {each.digest: place for place, each in enumerate(before.turns) if place >= first and each.size >= MIN_TURN}
    kept = [each for each in now.turns[first:] if each.digest in later]
    shared, start = sum([each.size for each in kept]), now.end_of(first)
    named = bool(now.session) and now.session == before.session
    if _is_compacted(now, before, first, named=named, shared=shared, moved=_moved_up(now, kept, first)):
        return Break(before, found._replace(cause=COMPACTION), min(now.units, before.units))
    if shared < MIN_SHARED or not (named or len(kept) > 1 or shared >= MIN_CONVERSATION):
        return None
    if not any(each.name in (ASSISTANT, TEXT) for each in kept) and not named:
        return None  # what users paste is in several conversations
    if _moved_up(now, kept, first):
        return Break(before, found._replace(cause=HISTORY_TRUNCATED), start + shared)
    return Break(before, found, start + shared)


def _is_compacted(now: ObservedRequest, before: ObservedRequest, first: int, *, named: bool, shared: int, moved: bool) -> bool:
    """first: the turn of the first difference. shared: bytes of later turns that both have. moved: see `_moved_up`."""
    size, earlier = (sum([each.size for each in one.body]) for one in (now, before))
    if size >= earlier or len(before.body) < MIN_COMPACTED:
        return False
    if any(each.summary for each in now.turns[first : first + EARLY]) and not before.turns[first].summary:
        return named or shared >= MIN_SHARED
    return named and 2 * size <= earlier and shared > 0 and not moved


def _moved_up(now: ObservedRequest, kept: Sequence[Segment], first: int) -> bool:
    """Whether what stands at the difference now stood behind it: turns before it were dropped."""
    return bool(kept) and now.turns[first].digest == kept[0].digest


def _same_thread(now: ObservedRequest, before: ObservedRequest) -> bool:
    same = now.session == before.session and now.thread == before.thread and now.model == before.model
    return bool(now.session) and same and now.block == before.block and not before.outline


def _by_keys(now: ObservedRequest, before: ObservedRequest) -> Break | None:
    """Only lengths are known: a prompt of the same thread that does not begin with the earlier one has left it."""
    if not _same_thread(now, before):
        return None
    same = common_blocks(now, before)
    if same >= min(now.blocks, before.blocks):
        return None
    cause, where = COMPACTION if 2 * now.units <= before.units else HISTORY_REWRITTEN, f"block {same + 1}"
    keys = [each.keys[8 * same : 8 * same + 4].hex() for each in (before, now)]
    found = Difference(cause, where, same * now.block, keys[0], keys[1], -1, volatile=False)
    return Break(before, found, min(now.units, before.units))
