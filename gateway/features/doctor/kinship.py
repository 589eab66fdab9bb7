"""Decides if a prompt should have continued an earlier one, where it diverges, and at what cost.

A difference alone is not a broken prefix: different conversations share a head, sub-agents run in their parent's session, a
user edits the last message and asks again. A break needs evidence that the earlier prompt's cache would have been useful: *a
part after the difference is equal in both*:

    a volatile text in the head             the rest of the head is equal; the conversation may be another one, unless the
                                            text is in a file's path: other users have other home folders
    tools in another order                  the same set
    a volatile text in a later turn         at least one later turn is equal
    model, adapter, salt, tools, system     the turns of the earlier prompt begin this one: it is the same conversation
    rewritten history                       later turns are equal
    truncated history                       later turns are equal, and the first of them has moved up
    compaction                              a shorter history that begins like a summary, of the same session or with turns of
                                            the earlier prompt; or a history of half the size, with turns of the same session

`reusable` is the part of the prompt that the earlier one would have provided without the difference: the bytes that are equal
in both (for a compaction: the length of the shorter prompt, because nothing is equal). The loss is that minus the actually
reusable part (`examination.py`). Prompts with known keys only (recorded traces) are compared by their lengths, within one
thread. Behind the last turn of an outline, the entries of prompt logs are compared, if both are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.dialects.prompt.outline import REST
from gateway.dialects.prompt.segments import TEXT, Segment
from gateway.features.doctor.causes import COMPACTION, HISTORY_REWRITTEN, HISTORY_TRUNCATED, TOOLS_REORDERED
from gateway.features.doctor.differences import Difference, first_difference, place_of_entry
from gateway.features.doctor.entries import ENTRY_KEY, entries_after, first_entry
from gateway.features.doctor.observed import ASSISTANT, ObservedRequest, answers_in, common_blocks

MIN_SHARED: Final = 512  # bytes of equal turns that count as evidence
MIN_TURN: Final = 64  # bytes of a turn that counts; "ok" and "yes" are in every conversation
MIN_CONVERSATION: Final = 1024  # bytes of equal turns that show one conversation without a session
MIN_COMPACTED: Final = 4  # turns of a conversation that may be compacted
EARLY: Final = 4  # first turns after the difference in which a summary is expected


class Break(NamedTuple):
    """The prompt diverges from an earlier one. reusable: see the top of this file, in units."""

    before: ObservedRequest
    difference: Difference
    reusable: int


def continues(now: ObservedRequest, before: ObservedRequest) -> bool:
    """True for the next request of the same conversation: it has all of the earlier prompt, and at most one more answer. If
    answers cannot be counted: the earlier prompt is at least half of it.
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
    loose, same = _common_turns(now, before), _same_conversation(now, before)
    if found.in_path and not same:
        return None
    if found.volatile or found.cause == TOOLS_REORDERED:
        if found.turn >= max(now.lead, before.lead):
            behind = sum([each.size for each in now.turns[found.turn + 1 : loose]])
            if _other_sessions(now, before) or behind < MIN_SHARED:
                return None
        if loose >= 0:
            return Break(before, found, now.end_of(loose))
    return Break(before, found, now.end_of(now.lead + same)) if same else None


def _other_sessions(now: ObservedRequest, before: ObservedRequest) -> bool:
    """True if they name different sessions, or different agents of one session."""
    return bool(now.session and before.session) and (now.session, now.thread) != (before.session, before.thread)


def _same_session(now: ObservedRequest, before: ObservedRequest) -> bool:
    """True if they name the same session, and the same agent of it."""
    return bool(now.session) and now.session == before.session and now.thread == before.thread


def _common_turns(now: ObservedRequest, before: ObservedRequest) -> int:
    """Number of common first turns, ignoring volatile texts; -1: even the heads differ."""
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
    """Number of common first turns after the system prompt, if these show one conversation; otherwise 0."""
    if _other_sessions(now, before):
        return 0
    same = _equal(now.body, before.body)
    grown = same == len(before.body) < len(now.body)
    if same and (grown or same > 1) and _same_session(now, before):
        return same
    if same > 1 and sum([each.size for each in now.body[:same]]) >= MIN_CONVERSATION:
        return same
    return 0


def _in_history(now: ObservedRequest, before: ObservedRequest, found: Difference) -> Break | None:
    if _other_sessions(now, before):
        return None
    first = found.turn
    later = {each.digest: place for place, each in enumerate(before.turns) if place >= first and each.size >= MIN_TURN}
    kept = [each for each in now.turns[first:] if each.digest in later]
    shared, start = sum([each.size for each in kept]), now.end_of(first)
    named = _same_session(now, before)
    if _is_compacted(now, before, first, named=named, shared=shared, moved=_moved_up(now, kept, first)):
        return Break(before, found._replace(cause=COMPACTION), min(now.units, before.units))
    if now.turns[first].name == before.turns[first].name == REST and found.entry >= 0:
        return _in_rest(now, before, found, named=named)
    if shared < MIN_SHARED or not (named or len(kept) > 1 or shared >= MIN_CONVERSATION):
        return None
    if not any(each.name in (ASSISTANT, TEXT) for each in kept) and not named:
        return None  # text pasted by users occurs in several conversations
    if _moved_up(now, kept, first):
        return Break(before, found._replace(cause=HISTORY_TRUNCATED), start + shared)
    return Break(before, found, start + shared)


def _in_rest(now: ObservedRequest, before: ObservedRequest, found: Difference, *, named: bool) -> Break | None:
    """The difference is in the last segment of both outlines. Its entries are known, and their sizes are taken as equal."""
    same, rest = entries_after(now.entries, before.entries, found.entry), now.turns[found.turn]
    first = found.turn - now.lead  # about its first entry
    count = max(1, len(now.entries) // ENTRY_KEY - first)
    shared = rest.size * len(same) // count
    if shared < MIN_SHARED or not (named or len(same) > 1):
        return None
    equal = min(count, max(0, found.entry - first) + len(same))
    cause = HISTORY_TRUNCATED if same[0] == found.entry else found.cause
    return Break(before, found._replace(cause=cause), now.end_of(found.turn) + rest.size * equal // count)


def _is_compacted(now: ObservedRequest, before: ObservedRequest, first: int, *, named: bool, shared: int, moved: bool) -> bool:
    """first: the turn of the first difference. shared: bytes of later turns in both. moved: see `_moved_up`."""
    size, earlier = (sum([each.size for each in one.body]) for one in (now, before))
    if size >= earlier or len(before.body) < MIN_COMPACTED:
        return False
    if any(each.summary for each in now.turns[first : first + EARLY]) and not before.turns[first].summary:
        return named or shared >= MIN_SHARED
    return named and 2 * size <= earlier and shared > 0 and not moved


def _moved_up(now: ObservedRequest, kept: Sequence[Segment], first: int) -> bool:
    """True if the turn at the difference was later in the earlier prompt: turns before it were dropped."""
    return bool(kept) and now.turns[first].digest == kept[0].digest


def _same_thread(now: ObservedRequest, before: ObservedRequest) -> bool:
    same = _same_session(now, before) and now.model == before.model
    return same and now.block == before.block and not before.outline


def _by_keys(now: ObservedRequest, before: ObservedRequest) -> Break | None:
    """Only lengths are known: a prompt of the same thread that does not begin with the earlier one has diverged."""
    if not _same_thread(now, before):
        return None
    same = common_blocks(now, before)
    if same >= min(now.blocks, before.blocks):
        return None
    cause, where = COMPACTION if 2 * now.units <= before.units else HISTORY_REWRITTEN, f"block {same + 1}"
    keys = [each.keys[8 * same : 8 * same + 4].hex() for each in (before, now)]
    entry = first_entry(now.entries, before.entries)
    where = where if entry < 0 else place_of_entry(entry)
    found = Difference(cause, where, same * now.block, keys[0], keys[1], -1, volatile=False, entry=entry)
    return Break(before, found, min(now.units, before.units))
