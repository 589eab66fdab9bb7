"""Planted causes are found, each by its name, in all dialects; in clean streams nothing is."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.agents.dialogues import Assistant, Dialogue, User, head, words
from bench.agents.kinds import KINDS, Kind
from gateway.dialects.prompt.outline import Outliner
from gateway.features.doctor import causes
from gateway.features.doctor.examination import FINDINGS, Examination
from gateway.features.doctor.observed import ObservedRequest
from gateway.features.doctor.report import report
from tests.gateway.features.doctor.conftest import Doctor
from tests.support.paths import TRACES
from tests.support.streams import BODIES, CHATS, COMPLETION, KINDS_OF_STREAMS, PROMPTS, SHAPE, Line, named, stream
from tests.support.tiers import gate

TEXTS = (
    "timestamp",
    "id",
    "nonce",
    "history_rewritten",
    "history_truncated",
    "compaction",
    *BODIES,
)  # that a plain text can have
PLANTED = [(kind, cause) for kind in CHATS for cause in (*PROMPTS, *BODIES)] + [(COMPLETION, cause) for cause in TEXTS]


SYSTEM: Line = {"role": "system", "content": "You work on source code. " + words(random.Random("system"), 2000)}
HELLO: list[Line] = [{"role": "user", "content": "Hello"}]


def in_session(body: Line) -> Line:
    return {"body": body, "headers": {"X-Session-Id": "s"}}


def found(examination: Examination) -> dict[str, int]:
    return {cause: each.count for cause, each in examination.sums.items()}


@pytest.mark.parametrize("kind", KINDS_OF_STREAMS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(3))
@gate("0-*", reason="other seeds draw other words")
def test_nothing_is_found_in_clean_streams(doctor: Doctor, kind: Kind, seed: int) -> None:
    examination = doctor(stream(kind, conversations=4, seed=seed))
    assert found(examination) == {}
    assert examination.reusable > 0.6 * examination.tokens


@pytest.mark.parametrize(("kind", "cause"), PLANTED, ids=lambda value: value if isinstance(value, str) else value.name)
@pytest.mark.parametrize("seed", range(3))
@gate("0-*", reason="other seeds draw other words")
def test_the_planted_cause_is_found_and_no_other(doctor: Doctor, kind: Kind, cause: str, seed: int) -> None:
    examination = doctor(stream(kind, cause, seed=seed))
    assert set(found(examination)) == {cause}
    assert examination.sums[cause].count >= 3, "in each conversation"
    assert examination.sums[cause].tokens > 1000


@pytest.mark.parametrize("kind", CHATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("cause", [causes.MODEL_CHANGED, causes.TOOLS_CHANGED, causes.HISTORY_REWRITTEN])
def test_what_happens_once_is_found_once_in_each_conversation(doctor: Doctor, kind: Kind, cause: str) -> None:
    assert found(doctor(stream(kind, cause, conversations=5))) == {cause: 5}


def test_lost_tokens_are_what_the_earlier_prompt_would_have_given(doctor: Doctor) -> None:
    """A time before everything: all that both prompts have in common, but for what a head of tools still gives."""
    (chat,) = (kind for kind in KINDS if kind.name == "messages-claude-code")
    requests = list(stream(chat, causes.SALT, conversations=1))
    examination = doctor(requests)
    clean = doctor(stream(chat, conversations=1))
    assert examination.reusable == 0
    assert abs(examination.lost - clean.reusable) < 0.02 * clean.reusable + 64 * len(requests)


def test_first_differences_have_a_place_and_no_text_unless_it_is_wanted(doctor: Doctor) -> None:
    chat = KINDS[0]
    finding = doctor(stream(chat, causes.TIMESTAMP)).findings[0]
    assert finding.where == "system prompt"
    assert not finding.shown
    assert len(finding.old) == len(finding.new) == 8
    assert finding.old != finding.new
    shown = doctor(stream(chat, causes.TIMESTAMP), text=True).findings[0]
    assert shown.shown
    assert "Current time: 2026-11-27T04:1" in shown.new
    assert shown.old != shown.new
    assert abs(shown.at - finding.at) < 30


def test_a_history_that_was_cut_to_a_fraction_was_truncated_and_not_compacted(doctor: Doctor) -> None:
    """In a session: what is left is what stood behind that, not a summary."""
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": f"Turn {number}. " + words(random.Random(number), 2000)}
        for number in range(13)
    ]
    whole, cut = ({"model": "m", "messages": [SYSTEM, *kept]} for kept in (turns[:11], turns[8:]))
    assert found(doctor([in_session(whole), in_session(cut)])) == {causes.HISTORY_TRUNCATED: 1}


@pytest.mark.parametrize(("length", "expected"), [(200, {}), (2000, {causes.SYSTEM_CHANGED: 1})])
def test_a_few_short_turns_that_are_the_same_make_no_conversation(
    doctor: Doctor, length: int, expected: dict[str, int]
) -> None:
    """Without a session: greetings, and what everybody asks first. What is lost would be the long system prompt."""
    talk = [
        {"role": role, "content": words(random.Random(role), length)}
        for role in ("user", "assistant", "user", "assistant", "user")
    ]
    bodies = [
        {"model": "m", "messages": [{"role": "system", "content": system + words(random.Random(0), 8000)}, *turns]}
        for system, turns in (("You sell. ", talk[:3]), ("You buy. ", talk))
    ]
    assert found(doctor({"body": body} for body in bodies)) == expected


@pytest.mark.parametrize(("length", "expected"), [(900, {}), (1200, {causes.HISTORY_REWRITTEN: 1})])
def test_one_short_answer_that_is_the_same_makes_no_conversation(doctor: Doctor, length: int, expected: dict[str, int]) -> None:
    """Without a session, and by tokens of 2 bytes, so that it would count."""
    answer = {"role": "assistant", "content": words(random.Random("answer"), length)}
    talks = [[{"role": "user", "content": words(random.Random(number), 3000)}, answer, *HELLO] for number in range(2)]
    outcome = {"replica": "a", "prompt_tokens": (3000 + length) // 2}
    assert found(doctor({"body": {"model": "m", "messages": talk}, "outcome": outcome} for talk in talks)) == expected


@pytest.mark.parametrize(
    ("changed", "cause"), [(1, causes.TOOLS_CHANGED), (2, causes.SETTINGS_CHANGED), (3, causes.SETTINGS_CHANGED)]
)
def test_a_difference_in_the_head_is_behind_the_tools_and_fields_that_are_the_same(
    doctor: Doctor, changed: int, cause: str
) -> None:
    """As a comparison of the texts finds it."""
    turns = [{"role": role, "content": words(random.Random(role), 3000)} for role in ("user", "assistant", "user")]
    parts = [words(random.Random(number), 3000) for number in range(4)]
    changes = [f"Other: {part}" if number == changed else part for number, part in enumerate(parts)]

    def body(texts: Sequence[str], count: int) -> Line:
        tools = [
            {"type": "function", "function": {"name": name, "description": text}}
            for name, text in zip("ab", texts, strict=False)
        ]
        fields = {"documents": [{"text": texts[2]}], "chat_template_kwargs": {"d": texts[3]}}
        return {"model": "m", "tools": tools, **fields, "messages": turns[:count]}

    requests = [in_session(body(parts, 1)), in_session(body(changes, 3))]
    blind, shown = (doctor(requests, text=text).findings for text in (False, True))
    assert [each.cause for each in blind] == [cause]
    assert abs(blind[0].at - shown[0].at) < 200


@pytest.mark.parametrize(("length", "count"), [(900, 0), (1200, 1)])
def test_less_than_256_tokens_are_no_finding(doctor: Doctor, length: int, count: int) -> None:
    """At 4 bytes each."""
    text = words(random.Random(0), length)
    bodies = [
        {"model": "m", "messages": [{"role": "system", "content": f"It is 2026-11-27 04:1{number}. {text}"}, *HELLO]}
        for number in range(2)
    ]
    assert found(doctor(map(in_session, bodies))) == ({causes.TIMESTAMP: count} if count else {})


def test_sub_agents_and_side_requests_of_a_session_are_no_break(doctor: Doctor) -> None:
    """They have the session's id, and a prompt of their own: with the same head, with another one, for another model."""
    (claude,) = (kind for kind in KINDS if kind.name == "messages-claude-code")
    requests = list[Line]()
    for number, line in enumerate(stream(claude, conversations=2)):
        requests.append(line)
        body = line["body"]
        same_head = {
            **body,
            "messages": [{"role": "user", "content": f"Find file {number}. " + words(random.Random(number), 900)}],
        }
        other_head = {**same_head, "system": "You search. " + words(random.Random("other"), 3000), "tools": body["tools"][:3]}
        title = {"model": "small", "system": "Write a title.", "messages": body["messages"][:1], "max_tokens": 20}
        requests += [{**line, "body": each} for each in (same_head, other_head, title)]
    assert found(doctor(requests)) == {}


@pytest.mark.parametrize("names", [{}, {"X-Claude-Code-Agent-Id": "a1"}])
def test_an_agent_that_begins_with_a_summary_of_its_session_is_no_compaction(doctor: Doctor, names: dict[str, str]) -> None:
    """It has the session's id, the same system prompt, and turns of its parent. Only its own id tells."""
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": f"Turn {number}. " + words(random.Random(number), 2000)}
        for number in range(11)
    ]
    summary = {"role": "user", "content": "This is a summary of our conversation. " + words(random.Random(99), 900)}
    claude = {"X-Claude-Code-Session-Id": "s"}
    parent = {"body": {"model": "m", "messages": [SYSTEM, *turns]}, "headers": claude}
    child = {"body": {"model": "m", "messages": [SYSTEM, summary, *turns[8:]]}, "headers": claude | names}
    grown = {**parent, "body": {"model": "m", "messages": [SYSTEM, *turns, *turns[:2]]}}
    expected = {} if names else {causes.COMPACTION: 1}
    assert found(doctor([parent, child, grown])) == expected


def test_users_who_edit_their_last_message_or_ask_again_break_nothing(doctor: Doctor) -> None:
    requests = list[Line]()
    for line in stream(KINDS[0], conversations=2):
        edited = json.loads(json.dumps(line))
        edited["body"]["messages"][-1]["content"] = "Something else: " + words(random.Random(len(requests)), 2000)
        requests += [line, line, edited]
    assert found(doctor(requests)) == {}


def test_different_conversations_that_share_a_head_or_a_document_break_nothing(doctor: Doctor) -> None:
    document = words(random.Random("document"), 5000)
    requests: list[Line] = [
        {"body": {"model": "m", "messages": [{"role": "user", "content": f"{document}\nQuestion {number}: {text}"}]}}
        for number, text in enumerate(["why", "where", "how many are there"])
    ]
    requests += [
        {"body": {"model": "m", "messages": [{"role": "system", "content": text}, {"role": "user", "content": document}]}}
        for text in ("Summarise. " + words(random.Random(1), 2000), "Translate. " + words(random.Random(2), 2000))
    ]
    assert found(doctor(requests)) == {}


@pytest.mark.parametrize(("where", "session", "expected"), [("{}", "{}", {}), ("{}", "s", {"nonce": 1}), ("1", "s", {})])
def test_two_home_folders_are_two_users_and_no_nonce(
    doctor: Doctor, where: str, session: str, expected: dict[str, int]
) -> None:
    """Within a conversation a path that changes breaks the prefix."""
    requests = list[Line]()
    for number in range(2):
        rest = words(random.Random("system"), 5000)
        system = {"role": "system", "content": f"Your memory is at /home/dev{where.format(number)}/memory. {rest}"}
        turns = [{"role": "user", "content": "Begin. " + words(random.Random("begin"), 2000)}]
        if number:
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        body = {"model": "m", "messages": [system, *turns]}
        requests.append({"body": body, "headers": {"X-Session-Id": session.format(number)}})
    assert found(doctor(requests)) == expected


def test_tenants_are_not_compared(doctor: Doctor) -> None:
    requests = list(stream(KINDS[0], causes.TIMESTAMP, conversations=1))
    for number, line in enumerate(requests):
        line["headers"] = {"X-Tenant-Id": f"t{number}"}
    assert found(doctor(requests)) == {}


def test_sums_findings_and_the_report_agree(doctor: Doctor) -> None:
    examination = doctor(stream(KINDS[0], causes.NONCE))
    told = report(examination)
    assert told["lost_tokens"] == sum(each["lost_tokens"] for each in told["findings"]) == examination.lost
    assert [each["cause"] for each in told["causes"]] == [causes.NONCE]
    assert told["causes"][0]["requests"] == len(told["findings"])
    assert told["causes"][0]["remedy"] == causes.REMEDIES[causes.NONCE]
    assert told["lost_usd"] is None


# -- conversations that only grow

WORDS = st.text("ab \n", max_size=12)
TALKS = st.lists(st.lists(WORDS, min_size=1, max_size=5), min_size=1, max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talks=TALKS, order=st.randoms(use_true_random=False), kind=st.sampled_from(KINDS_OF_STREAMS), seed=st.integers(0, 9))
def test_conversations_that_only_grow_have_no_finding(
    doctor: Doctor, talks: list[list[str]], order: random.Random, kind: Kind, seed: int
) -> None:
    """In any dialect, with any interleaving. Half of the texts are long, so that they could count."""
    assert found(doctor(grown(talks, order, kind, seed))) == {}


def grown(talks: Sequence[Sequence[str]], order: random.Random, kind: Kind, seed: int) -> Iterator[Line]:
    known, dialogues = head(SHAPE, seed), [Dialogue(number, SHAPE, seed) for number in range(len(talks))]
    left = [number for number, talk in enumerate(talks) for _ in talk]
    order.shuffle(left)
    for number in left:
        dialogue = dialogues[number]
        text = talks[number][dialogue.turn] * (1 + 200 * (dialogue.turn % 2))
        dialogue.turn += 1
        dialogue.entries.append(User((f"{text}.",)))
        body, headers = kind.write(dialogue, known, 100, order)
        yield {"path": kind.path, "body": body, "headers": headers}
        dialogue.answered(Assistant(f"{text}!", None), "")


# -- recorded traces


def sessions() -> list[dict[str, Any]]:
    """Of coding agents: those that were recorded, if they are here, else some that are made up."""
    recorded = TRACES / "claude_code_agentic.jsonl.gz"
    if recorded.exists():
        return [json.loads(line) for line in gzip.decompress(recorded.read_bytes()).splitlines()[:60]]
    grown = [{"in": 64 * (80 + 10 * turn), "out": 50, "keep": 70 + 10 * turn if turn else 0} for turn in range(20)]
    for turn, request in enumerate(grown):
        request["new"] = [[1, 80]] if not turn else [[71 + 10 * turn, 10]]  # type: ignore[assignment]
    return [
        {"id": str(number), "block_size": 64, "tool_tokens": 640, "system_tokens": 640, "requests": grown}
        for number in range(9)
    ]


def until_broken(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first requests of a session, as far as each continues the one before."""
    good, before = list[Mapping[str, Any]](), 0
    for request in requests:
        if "requests" in request or (good and request["keep"] < before):
            break
        good.append(request)
        before = request["in"] // 64
    return good


@pytest.fixture(scope="module")
def clean() -> list[dict[str, Any]]:
    cut = [{**session, "requests": until_broken(session["requests"])} for session in sessions()]
    return [session for session in cut if len(session["requests"]) >= 12]


def test_nothing_is_found_in_clean_traces(doctor: Doctor, clean: list[dict[str, Any]]) -> None:
    assert len(clean) >= 5
    examination = doctor(clean)
    assert found(examination) == {}
    assert examination.sessions == len(clean)


@pytest.mark.parametrize(("cause", "length"), [(causes.HISTORY_REWRITTEN, 1.0), (causes.COMPACTION, 0.3)])
def test_what_is_planted_in_traces_is_found(doctor: Doctor, clean: list[dict[str, Any]], cause: str, length: float) -> None:
    """The tenth request leaves the head of the one before, and goes on with blocks of its own."""
    planted = list[dict[str, Any]]()
    for session in clean:
        requests = [dict(request) for request in session["requests"][:10]]
        head_blocks = (session["tool_tokens"] + session["system_tokens"]) // 64 + 1
        blocks = max(head_blocks + 20, int(requests[8]["in"] // 64 * length))
        requests[9].update({"in": 64 * blocks, "keep": head_blocks, "new": [[900_000, blocks - head_blocks]]})
        planted.append({**session, "requests": requests})
    examination = doctor(planted)
    assert set(found(examination)) <= {causes.HISTORY_REWRITTEN, causes.COMPACTION}
    assert found(examination)[cause] >= 0.5 * len(planted)
    assert sum(found(examination).values()) == len(planted)


@pytest.mark.skipif(not TRACES.exists(), reason="no recorded traces beside the repository")
@pytest.mark.parametrize(("name", "share"), [("conversation", 0.374), ("synthetic", 0.65)])
def test_traces_without_sessions_are_counted_only(doctor: Doctor, name: str, share: float) -> None:
    """Their shares are known: with an endless cache 37.4 % and 65 % are found again."""
    raw = gzip.decompress((TRACES / f"mooncake_{name}.jsonl.gz").read_bytes())
    examination = doctor(json.loads(line) for line in raw.splitlines())
    assert found(examination) == {}
    assert examination.reusable / examination.tokens == pytest.approx(share, abs=0.005)
    assert "no session" in report(examination)["notes"][0]


# -- floods


def test_a_flood_of_broken_requests_is_bounded() -> None:
    outliner, examination = Outliner(), Examination(max_prompts=50, max_bytes=1 << 20)
    text = words(random.Random(0), 3000)
    for number in range(FINDINGS + 200):
        prompt = f"Now: 2026-11-27 04:{number // 60:02}:{number % 60:02}. {text}".encode()
        seen = ObservedRequest("m", b"", len(prompt), 256, outline=outliner.outline(prompt))
        seen.session = f"s{number}"
        examination.add(seen)
    examination.check()
    assert found(examination) == {}, "one paragraph, and nothing of it can be shared"
    for number in range(FINDINGS + 200):
        prompt = f"Now: 2026-11-27 04:{number // 60:02}:{number % 60:02}.\n\n{text}".encode()
        examination.add(ObservedRequest("m", b"", len(prompt), 256, outline=outliner.outline(prompt)))
    examination.check()
    outliner.check()
    assert len(examination.findings) == FINDINGS
    assert found(examination)[causes.TIMESTAMP] == FINDINGS + 199


def test_named_kinds_are_what_the_streams_say(tmp_path: Path) -> None:
    doctor = Doctor(tmp_path / "s.jsonl")
    for kind in KINDS_OF_STREAMS:
        assert (doctor(stream(kind)).sessions == 3) == named(kind)
