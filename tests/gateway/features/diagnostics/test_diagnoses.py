"""`diagnostics.previous_message_id` through a whole gateway, and the bounds of what is remembered for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.dialects.diagnosis import Diagnosis, Fingerprint
from gateway.dialects.events.sse import events_of, object_of
from gateway.dialects.table import DIALECTS
from gateway.features.diagnostics.diagnoses import TTL_S, Diagnoses
from tests.gateway.conftest import Running, running
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.request.test_cache_control import RULES
from tests.gateway.request.test_dialects import ASKED, BEGUN, ENDS, MESSAGES, SAYS, events, message
from tests.support.fakes import Behaviour, FakeReplica, answers, http, status, streams, writes

SAID = {**ASKED, "system": RULES}
NOT_FOUND = {"cache_miss_reason": {"type": "previous_message_not_found"}}


async def told(run: Running, body: dict[str, Any], **headers: str) -> tuple[str, Any]:
    """The answer's id and its `diagnostics` ("none": without that field)."""
    async with run.session.post(run.url + MESSAGES, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        raw = await answer.read()
    found = next(map(object_of, events_of(raw)))["message"] if body.get("stream") else json.loads(raw)
    return found["id"], found.get("diagnostics", "none")


def asking(previous: str | None, **more: Any) -> dict[str, Any]:
    return {**SAID, **more, "diagnostics": {"previous_message_id": previous}}


@pytest.mark.parametrize(
    ("engine", "stream"),
    [
        (message(), False),
        (events(BEGUN + SAYS, ENDS), True),
        (chat_only(answers()), False),
        (chat_only(streams("hello")), True),
    ],
)
async def test_a_client_learns_where_its_prompt_has_changed(engine: Behaviour, stream: bool) -> None:
    async with FakeReplica([engine]) as replica, running(replica) as run:
        id_, first = await told(run, asking(None, stream=stream))
        assert first is None, "it asks for the first time"
        assert (await told(run, asking(id_, stream=stream)))[1] is None, "nothing has changed"
        _, found = await told(run, asking(id_, stream=stream, system="You do not. " + RULES))
        assert found["cache_miss_reason"]["type"] == "system_changed"
        assert found["cache_miss_reason"]["cache_missed_input_tokens"] > 90
        assert (await told(run, asking("msg_of_another", stream=stream)))[1] == NOT_FOUND
        assert all("diagnostics" not in request.json for request in replica.requests), "no engine has to know the field"


async def test_who_does_not_ask_is_told_nothing_and_not_remembered() -> None:
    async with FakeReplica([message()]) as replica, running(replica) as run:
        id_, found = await told(run, SAID)
        assert found == "none"
        assert (await told(run, asking(id_)))[1] == NOT_FOUND


async def test_a_prompt_belongs_to_who_has_sent_it() -> None:
    async with FakeReplica([message()]) as replica, running(replica) as run:
        id_, _ = await told(run, asking(None), Authorization="Bearer one")
        assert (await told(run, asking(id_), Authorization="Bearer two"))[1] == NOT_FOUND
        assert (await told(run, asking(id_), Authorization="Bearer one"))[1] is None


async def test_an_engine_that_knows_the_field_answers_itself() -> None:
    own = {"cache_miss_reason": {"type": "unavailable"}}
    body = {"id": "msg_1", "type": "message", "diagnostics": own, "usage": {"input_tokens": 1, "output_tokens": 1}}
    async with FakeReplica([writes(http(200, json.dumps(body).encode()))]) as replica:
        pool = [{"replicas": [replica.url], "strip_billing_header": False}]
        async with running(pools=pool) as run:
            assert (await told(run, asking("msg_0")))[1] == own
            assert replica.requests[-1].json["diagnostics"] == {"previous_message_id": "msg_0"}


async def test_a_large_body_is_read_elsewhere() -> None:
    async with FakeReplica([message()]) as replica, running(replica, model_aliases={"claude-*": "m"}) as run:
        large = [{"role": "user", "content": RULES * 50}]
        id_, _ = await told(run, asking(None, model="claude-opus-4-5", messages=large))
        _, found = await told(run, asking(id_, model="claude-opus-4-5", messages=[{"role": "user", "content": "x"}, *large]))
        assert found["cache_miss_reason"]["type"] == "messages_changed"
        sent = replica.requests[-1].json
        assert (sent["model"], "diagnostics" in sent) == ("m", False)


async def test_a_wrong_question_is_a_400() -> None:
    async with FakeReplica([message()]) as replica, running(replica) as run:
        status, _, error = await run.post({**SAID, "diagnostics": {"previous_message_id": 1}}, path=MESSAGES)
        assert (status, error["error"]["type"]) == (400, "invalid_request_error")
        assert not replica.requests


# -- what is remembered


def prompts(count: int, size: int = 80) -> Iterator[tuple[str, Fingerprint]]:
    for number in range(count):
        yield f"msg_{number}", Fingerprint("m", ("", "", ""), b"%08d" % number * (size // 8), 10)


def known(diagnoses: Diagnoses, id_: str, prompt: Fingerprint, now: float) -> bool:
    asked = Diagnosis(id_, prompt.head, [])
    diagnoses.diagnose(DIALECTS[MESSAGES], asked, "owner", prompt, now)
    return b"not_found" not in asked.told


@pytest.mark.parametrize(("most", "most_bytes", "left"), [(10, 1 << 20, 10), (1000, 5800, 10)])
def test_a_flood_of_ids_is_bounded(most: int, most_bytes: int, left: int) -> None:
    diagnoses = Diagnoses(lambda: 0.0, most, most_bytes)
    flood = list(prompts(100))
    for id_, prompt in flood:
        diagnoses.remember(id_, "owner", prompt, 0.0)
        diagnoses.check()
    assert len(diagnoses) == left
    assert [known(diagnoses, id_, prompt, 1.0) for id_, prompt in flood] == [False] * (100 - left) + [True] * left


def test_ids_expire_and_may_come_again() -> None:
    diagnoses = Diagnoses(lambda: 0.0)
    (id_, one), (other, two) = prompts(2)
    diagnoses.remember(id_, "owner", one, 0.0)
    assert known(diagnoses, id_, one, TTL_S - 1)
    assert not known(diagnoses, id_, one, TTL_S)
    diagnoses.remember(id_, "owner", one, 10.0)
    assert known(diagnoses, id_, one, TTL_S + 9)
    diagnoses.remember(other, "owner", two, TTL_S + 20)
    diagnoses.check()
    assert len(diagnoses) == 1, "what has expired is dropped"


async def test_a_fallback_answers_what_the_pool_before_would_have_answered_itself() -> None:
    async with FakeReplica([status(500)] * 9) as provider, FakeReplica([message()]) as own:
        pools = [
            {"name": "a", "models": ["m"], "replicas": [provider.url], "strip_billing_header": False, "fallback": "b"},
            {"name": "b", "models": ["own"], "replicas": [own.url]},
        ]
        async with running(pools=pools) as run:
            assert (await told(run, asking(None)))[1] is None
            assert provider.requests[0].json["diagnostics"] == {"previous_message_id": None}
            assert "diagnostics" not in own.requests[-1].json
            assert (await told(run, asking("msg_of_another")))[1] == NOT_FOUND
