"""Conversations of unmodified clients through two gateways: the engine gets what the client has sent, and the link a part."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.features.prompt_log.naming.forms import names_in
from gateway.request.exchange import Exchange
from gateway.request.extensions import Preparer
from tests.gateway.conftest import Running, running
from tests.gateway.features.prompt_log.delta.two_gateways import (
    TwoGateways,
    called,
    delta_config,
    engine_turns,
    history_of,
    result_of,
    two_gateways,
)
from tests.gateway.features.prompt_log.kept import (
    ALL,
    CHAT,
    FORMS,
    MESSAGES,
    NOW,
    RESPONSES,
    SAID,
    SYSTEM,
    TOOLS,
    USER,
    asked,
    body_of,
    engine,
    kept_in,
)
from tests.gateway.features.prompt_log.test_shown import page_of
from tests.gateway.features.websocket.test_responses_socket import answer, dial, send
from tests.support.fakes import FakeReplica, FakeRequest, answers, http, status, streams, writes

LONG = {"role": "user", "content": "please read this\n" * 200}
FRAME: dict[str, dict[str, Any]] = {path: {**SYSTEM[path], "tools": TOOLS[path]} for path in FORMS}


def led(path: str, *turns: Any) -> list[Any]:
    """Turns after the system's, where it is a turn."""
    return [*([{"role": "system", "content": "Be brief."}] if path == CHAT else []), *turns]


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_the_engine_gets_the_whole_conversation_and_the_link_a_part(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=stream)]) as replica, two_gateways(replica, tmp_path) as two:
        turns = led(path, LONG)
        raw = []
        for _ in range(4):
            code, headers, body = await two.ask(path, turns, stream=stream, **FRAME[path])
            assert code == 200
            assert "Prompt-Log" not in headers
            raw.append(body)
            assert replica.requests[-1].json.get("tools") == TOOLS[path]
            assert texts(engine_turns(replica, path)) == texts(turns)
            turns += [SAID, NOW]
        assert b"prompt_log" not in b"".join(raw)
        assert await two.counts() == {"whole": 1, "delta": 3}
        sent, whole = await two.bytes("sent"), await two.bytes("saved") + await two.bytes("sent")
        assert whole > 3 * sent
        direct = {
            "json": body_of(path, led(path, LONG), stream=stream, **FRAME[path]),
            "headers": {"Authorization": "Bearer k"},
        }
        async with two.far.session.post(two.far.url + path, **direct) as answer:
            assert anonymous(await answer.read()) == anonymous(raw[0])


def texts(turns: list[Any]) -> list[tuple[str, str]]:
    found = []
    for turn in turns:
        content = turn["content"]
        found.append((turn["role"], content if isinstance(content, str) else "".join(part["text"] for part in content)))
    return found


def anonymous(raw: bytes) -> Any:
    """An answer without its id, which the engine makes anew."""
    lines = raw.splitlines() if raw.startswith((b"data:", b"event:")) else [b"data: " + raw]
    datas = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    for data in datas:
        for each in (data, data.get("response", {})):
            each.pop("id", None)
    return datas


@pytest.mark.parametrize("path", FORMS)
async def test_results_reach_their_calls_and_reasoning_may_be_dropped(path: str, tmp_path: Path) -> None:
    """Engines repeat texts with other ids; a client drops the reasoning of an answer, another one writes members anew."""
    number = 0

    async def calls(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        await writes(http(200, json.dumps(called(path, f"c{number}", "I look.", "Hm.")).encode()))(_request, writer)

    async with FakeReplica([calls]) as replica, two_gateways(replica, tmp_path) as two:
        turns: list[Any] = [LONG]
        for drops in (False, True, False):
            for _ in range(2):
                code, _, raw = await two.ask(path, turns)
                assert code == 200
                answer = json.loads(raw)
                said = history_of(path, answer)
                if drops:
                    said = [unreasoned(each) for each in said if each.get("type") != "reasoning"]
                turns += [json.loads(json.dumps(each, sort_keys=True)) for each in said]
                turns.append(result_of(path, f"c{number}", f"result {number}"))
                code, _, _ = await two.ask(path, turns)
                whole = names_in(json.dumps(body_of(path, turns)).encode(), FORMS[path])
                assert names_in(replica.requests[-1].body, FORMS[path]).chain == whole.chain
                assert ids(engine_turns(replica, path)) == ids(turns)
                number -= 1
        counts = await two.counts()
        assert counts["delta"] >= 10
        assert "replayed" not in counts


def unreasoned(turn: Any) -> Any:
    kept = {name: value for name, value in turn.items() if not name.startswith("reasoning")}
    if isinstance(kept.get("content"), list):
        kept["content"] = [part for part in kept["content"] if part["type"] != "thinking"]
    return kept


def ids(turns: list[Any]) -> list[str]:
    found = []
    for turn in turns:
        found += [call["id"] for call in turn.get("tool_calls") or ()]
        found += [turn[name] for name in ("tool_call_id", "call_id") if name in turn]
        content = turn.get("content")
        for part in content if isinstance(content, list) else ():
            found += [part[name] for name in ("id", "tool_use_id") if name in part]
    return found


@pytest.mark.parametrize("path", FORMS)
async def test_a_client_that_gives_calls_other_ids_is_understood(path: str, tmp_path: Path) -> None:
    answer = called(path, "c1", "I look.")
    plain = writes(http(200, json.dumps(answer).encode()))
    async with FakeReplica([plain]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(path, [LONG])
        said = json.loads(json.dumps(history_of(path, answer)).replace('"c1"', '"other"'))
        turns = [LONG, *said, result_of(path, "other", "result")]
        code, _, _ = await two.ask(path, turns)
        assert code == 200
        assert ids(engine_turns(replica, path)) == ids(turns) == ["other", "other"]
        assert await two.counts() == {"whole": 1, "delta": 1}


@pytest.mark.parametrize("path", FORMS)
async def test_a_client_that_rewrites_its_history_is_understood(path: str, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(path, led(path, LONG), **FRAME[path])
        await two.ask(path, led(path, LONG, SAID, NOW), **FRAME[path])
        compacted = led(path, {"role": "user", "content": "the summary"}, SAID, NOW)
        await two.ask(path, compacted, **FRAME[path])
        assert texts(engine_turns(replica, path)) == texts(compacted)
        edited = led(path, LONG, {"role": "assistant", "content": "no"}, NOW)
        await two.ask(path, edited, **FRAME[path])
        assert texts(engine_turns(replica, path)) == texts(edited)
        other = {**FRAME[path], "tools": []}
        await two.ask(path, led(path, LONG, SAID, NOW, SAID, NOW), **other)
        assert not replica.requests[-1].json.get("tools")
        assert await two.counts() == {"whole": 1, "delta": 4}


async def test_what_follows_a_cut_does_not_become_the_system(tmp_path: Path) -> None:
    """A text of the system in mid-conversation: it is a turn, and would lead the rest of the body."""
    late = {"role": "system", "content": "Be long now."}
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path) as two:
        for turns in ([LONG], [LONG, SAID, late, NOW], [LONG, SAID, late, NOW, SAID, late]):
            code, _, _ = await two.ask(CHAT, turns)
            assert code == 200
            assert engine_turns(replica, CHAT) == turns
        for turns in (led(CHAT, LONG), led(CHAT, LONG, SAID, late, NOW)):
            await two.ask(CHAT, turns, tools=TOOLS[CHAT])
            assert engine_turns(replica, CHAT) == turns
        assert await two.counts() == {"whole": 2, "delta": 3}


async def test_a_frame_and_a_base_are_known_to_their_api_only(tmp_path: Path) -> None:
    """They have one name in all APIs, but the far gateway keeps them as they were written, and would refuse another API's."""
    frame = {"tools": TOOLS[RESPONSES], "instructions": "Be brief."}
    behaviours = [answers(), engine(RESPONSES, stream=False)]
    async with FakeReplica(behaviours) as replica, two_gateways(replica, tmp_path) as two:
        assert (await two.ask(CHAT, led(CHAT, LONG), tools=TOOLS[CHAT]))[0] == 200
        assert (await two.ask(RESPONSES, [LONG, SAID, NOW], **frame))[0] == 200
        assert await two.counts() == {"whole": 2}


async def test_a_workflow_as_a_model_ends_no_deltas_of_other_models(tmp_path: Path) -> None:
    """The far gateway keeps no logs of a model that it serves itself, so its answer has no header."""
    step = {"chat": {"from": "${inputs.messages}"}, "yield": "answer"}
    inputs = {"messages": {"type": "messages", "required": True}}
    flow = {"workflow": 1, "name": "echo", "inputs": inputs, "defaults": {"model": "m"}, "steps": {"answer": step}}
    (tmp_path / "echo.yaml").write_text(json.dumps(flow))
    config = {**kept_in(tmp_path), "workflows": {"directory": str(tmp_path)}}
    async with (
        FakeReplica([answers()]) as replica,
        running(replica, **config) as far,
        running(**delta_config(far.url), workflows={"enabled": False}) as near,
    ):
        two = TwoGateways(near, far, replica)
        for turns in ([LONG], [LONG, SAID, NOW]):
            assert (await two.ask(CHAT, turns))[0] == 200
            assert (await two.ask(CHAT, turns, model="workflow:echo"))[0] == 200
        assert await two.counts() == {"whole": 1, "delta": 1, "off": 2}


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_after_a_purge_the_same_request_goes_whole(path: str, stream: bool, tmp_path: Path) -> None:
    async with FakeReplica([engine(path, stream=stream)]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(path, led(path, LONG), stream=stream, **FRAME[path])
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("delete from warmroute_responses")
            file.execute("delete from warmroute_frames")
        turns = led(path, LONG, SAID, NOW)
        for expected in ({"whole": 1, "replayed": 1}, {"whole": 1, "replayed": 1, "delta": 1}):
            code, _, _ = await two.ask(path, turns, stream=stream, **FRAME[path])
            assert code == 200
            assert texts(engine_turns(replica, path)) == texts(turns)
            assert await two.counts() == expected
            turns += [SAID, NOW]
        assert len(replica.requests) == 3, "nothing was generated twice"


async def test_an_expired_base_goes_whole(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(CHAT, [LONG])
        with sqlite3.connect(tmp_path / "state.db") as file:
            file.execute("update warmroute_responses set expires_at = 7")
        await two.ask(CHAT, [LONG, SAID, NOW])
        assert engine_turns(replica, CHAT) == [LONG, SAID, NOW]
        assert await two.counts() == {"whole": 1, "replayed": 1}


async def test_a_gateway_without_a_store_keeps_nothing_and_answers(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path, state={"url": "off"}) as two:
        for turns in ([LONG], [LONG, SAID, NOW]):
            code, _, _ = await two.ask(CHAT, turns)
            assert code == 200
            assert engine_turns(replica, CHAT) == turns
        assert await two.counts() == {"whole": 2}
        assert len(two.form.heads) == 0


async def test_a_store_that_is_gone_costs_a_second_upload_and_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    async with FakeReplica([answers()]) as replica, two_gateways(replica, folder) as two:
        await two.ask(CHAT, [LONG])
        shutil.rmtree(folder)
        turns: list[Any] = [LONG, SAID, NOW]
        for _ in range(3):
            code, _, _ = await two.ask(CHAT, turns)
            assert code == 200
            assert engine_turns(replica, CHAT) == turns
            turns += [SAID, NOW]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_old_gateway_gets_whole_conversations(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        FakeReplica([streams("hel", "lo") if stream else answers()]) as replica,
        running(replica, prompt_log=False) as old,
        running(**delta_config(old.url)) as near,
    ):
        for turns in ([LONG], [LONG, SAID, NOW]):
            async with near.session.post(near.url + CHAT, json=body_of(CHAT, turns, stream=stream)) as answer:
                assert answer.status == 200
                await answer.read()
            assert engine_turns(replica, CHAT) == turns
        found = await near.metrics()
        assert found['warmroute_delta_requests_total{result="off"}'] == 2
    lines = [each for each in caplog.records if "without Prompt-Log" in each.getMessage()]
    assert len(lines) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_to_a_part_without_the_header_is_dropped(stream: bool, tmp_path: Path) -> None:
    """The other gateway forgets the header between two requests. Its answer to the part of a conversation reaches nobody."""
    one = streams("hel", "lo") if stream else answers()
    async with FakeReplica([one]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(CHAT, [LONG], stream=stream)
        preparers = two.far.gateway.extensions.preparers
        kept, preparers[:] = list(preparers), []
        turns: list[Any] = [LONG, SAID, NOW]
        code, _, raw = await two.ask(CHAT, turns, stream=stream)
        assert (code, b"hel" in raw) == (200, True)
        assert [len(each.json["messages"]) for each in replica.requests] == [1, 1, 3]
        preparers[:] = kept
        await two.ask(CHAT, [*turns, SAID, NOW], stream=stream)
        assert len(engine_turns(replica, CHAT)) == 5
        assert await two.counts() == {"whole": 1, "replayed": 1, "off": 1}


async def test_a_refusal_that_may_be_about_the_part_is_asked_again_about_the_whole(tmp_path: Path) -> None:
    """The log is too long for the other gateway: the client gets the error about its own body."""
    half = {"role": "user", "content": "x" * 600_000}
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path, limits={"body_mb": 1}) as two:
        assert (await two.ask(CHAT, [half]))[0] == 200
        errors = []
        for run in (two.near, two.far):
            body = io.BytesIO(json.dumps(body_of(CHAT, [half, SAID, half])).encode())
            async with run.session.post(run.url + CHAT, data=body, headers={"Authorization": "Bearer k"}) as answer:
                errors.append((answer.status, (await answer.json())["error"]["message"]))
        assert errors[0] == errors[1]
        assert errors[0][0] == 413
        assert (await two.ask(CHAT, [half, SAID, NOW]))[0] == 200
        assert await two.counts() == {"whole": 1, "replayed": 1, "delta": 1}, "what was acknowledged still is"


async def test_an_engines_error_is_passed_on_once(tmp_path: Path) -> None:
    async with FakeReplica([answers(), status(400, "too long"), answers()]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(CHAT, [LONG])
        code, _, raw = await two.ask(CHAT, [LONG, SAID, NOW])
        assert (code, b"too long" in raw, len(replica.requests)) == (400, True, 2)
        assert (await two.ask(CHAT, [LONG, SAID, NOW]))[0] == 200


async def test_nothing_is_remembered_of_one_caller_for_another_one(tmp_path: Path) -> None:
    """Else the time of a request would tell what others have sent."""
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path) as two:
        remembered = [(await two.ask(CHAT, [LONG], key), repr(two.form.outlines))[1] for key in ("a", "a", "b", "b")]
        counts = [int("".join(filter(str.isdigit, each))) for each in remembered]
        assert counts[0] > 1
        assert counts == [counts[0], counts[0], 2 * counts[0], 2 * counts[0]]


async def test_no_caller_gets_the_head_of_another_one(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path) as two:
        for key in ("one", "other"):
            await two.ask(CHAT, [LONG], key)
        for headers in ({"X-Tenant-Id": "one"}, {"X-Api-Key": "k"}):
            await two.ask(CHAT, [LONG, SAID, NOW], "third", headers=headers)
        assert await two.counts() == {"whole": 4}
        await two.ask(CHAT, [LONG, SAID, NOW], "one")
        assert await two.counts() == {"whole": 4, "delta": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_with_the_header_speaks_with_the_other_gateway(stream: bool, tmp_path: Path) -> None:
    one = streams("hel", "lo") if stream else answers()
    async with FakeReplica([one]) as replica, two_gateways(replica, tmp_path) as two:
        code, headers, raw = await two.ask(CHAT, [LONG], stream=stream, headers={"Prompt-Log": "keep"})
        assert code == 200
        assert 'input="pl1_' in headers["Prompt-Log"]
        assert (b'"prompt_log"' in raw) == stream
        head = json.loads(raw.split(b'"prompt_log":', 1)[1].split(b"}")[0] + b"}")["head"] if stream else ""
        head = head or headers["Prompt-Log"].split('head="')[1].split('"')[0]
        await two.ask(CHAT, [NOW], stream=stream, headers={"Prompt-Log": f'keep, base="{head}"'})
        assert texts(engine_turns(replica, CHAT)) == texts([LONG, SAID, NOW])
        code, _, raw = await two.ask(CHAT, [NOW], headers={"Prompt-Log": 'base="pl1_nonsense"'})
        assert (code, json.loads(raw)["error"]["code"]) == (400, "prompt_log_invalid")
        async with two.near.session.get(f"{two.near.url}/v1/logs/{head}", headers={"Authorization": "Bearer k"}) as found:
            assert (found.status, (await found.json())["length"]) == (200, 2)


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_base_goes_to_the_gateway_that_has_told_it(path: str, stream: bool, tmp_path: Path) -> None:
    """Of several, each with a store of its own, through a gateway that passes the header on."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    async with (
        FakeReplica([engine(path, stream=stream)]) as replica,
        running(replica, **kept_in(folders[0])) as one,
        running(replica, **kept_in(folders[1])) as two,
        running(replica, **kept_in(folders[2])) as three,
        running(**delta_config(one.url, two.url, three.url), routing={"policy": "round_robin"}) as near,
    ):
        await page_of(near)
        conversations = [("keep", [{"role": "user", "content": f"question {number}"}]) for number in range(7)]
        for length in (1, 3, 5):
            for at, (header, turns) in enumerate(conversations):
                code, told, raw = await asked(near, path, header, turns, stream=stream)
                assert (code, told.get("length")) == (200, length + 1), raw
                conversations[at] = f'keep, base="{told["head"]}"', [NOW]
        rows = Counter((row["log_entries"], row["log_sent"]) for row in (await page_of(near))["requests"])
        assert rows == {(1, "whole"): 7, (3, "base"): 7, (5, "base"): 7}
        heads = [header.partition('"')[2].strip('"') for header, _ in conversations]
        assert [await status_at(near, "GET", head) for head in heads] == [200] * 7
        assert [await status_at(near, "GET", f"{head}/entries?limit=1") for head in heads] == [200] * 7
        assert [await status_at(near, "DELETE", f"{head}?tree=true") for head in heads] == [200] * 7
        assert [await status_at(near, "GET", head) for head in heads] == [404] * 7
        assert await status_at(near, "GET", f"pl1_{'A' * 43}") == 404, "no gateway is known to have it"


async def status_at(run: Running, method: str, path: str) -> int:
    async with run.session.request(method, f"{run.url}/v1/logs/{path}", headers={"Authorization": "Bearer k"}) as answer:
        return answer.status


async def test_a_gateway_that_serves_the_header_itself_uploads_deltas_too(tmp_path: Path) -> None:
    """Its own names are in the answer, and not those of the other gateway."""
    async with (
        FakeReplica([streams("hel", "lo")]) as replica,
        running(replica, **kept_in(tmp_path)) as far,
        running(**{**delta_config(far.url), "prompt_log": True}) as near,
    ):
        headers = {"Prompt-Log": "name", "Authorization": "Bearer k"}
        for turns in ([LONG], [LONG, SAID, NOW]):
            body = body_of(CHAT, turns, stream=True)
            async with near.session.post(near.url + CHAT, json=body, headers=headers) as answer:
                raw = await answer.read()
                assert "kept" not in answer.headers["Prompt-Log"]
            assert raw.count(b'"prompt_log"') == 1
            assert b'"kept"' not in raw
        assert texts(engine_turns(replica, CHAT)) == texts([LONG, SAID, NOW])
        assert (await near.metrics())['warmroute_delta_requests_total{result="delta"}'] == 1


async def test_several_answers_and_foreign_turns_go_without_the_header(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(CHAT, [LONG], n=2)
        assert await two.counts() == {"off": 1}
        code, _, raw = await two.ask(RESPONSES, [USER], previous_response_id="resp_x")
        assert (code, json.loads(raw)["error"]["code"]) == (400, "previous_response_not_found")
        assert await two.counts() == {"off": 2}
        assert len(replica.requests) == 1


async def test_the_billing_line_of_an_agent_does_not_break_the_frame(tmp_path: Path) -> None:
    def system(nonce: str) -> list[Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
        return [{"type": "text", "text": line}, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]

    async with FakeReplica([engine(MESSAGES, stream=True)]) as replica, two_gateways(replica, tmp_path) as two:
        turns: list[Any] = [LONG]
        for nonce in ("a", "b", "c"):
            code, _, _ = await two.ask(MESSAGES, turns, stream=True, system=system(nonce), tools=TOOLS[MESSAGES])
            assert code == 200
            sent = replica.requests[-1].json
            assert [block["text"] for block in sent["system"]][-1] == "Be brief."
            assert texts(sent["messages"]) == texts(turns)
            turns += [SAID, NOW]
        assert await two.counts() == {"whole": 1, "delta": 2}


async def test_another_gateway_of_the_pool_gets_the_whole(tmp_path: Path) -> None:
    """Heads are acknowledged by one gateway: if it fails, the next one gets the whole body, on the same request."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    async with (
        FakeReplica([answers()]) as replica,
        running(replica, **kept_in(folders[0])) as one,
        running(replica, **kept_in(folders[1])) as two,
        running(**delta_config(one.url, two.url)) as near,
    ):

        async def ask(turns: list[Any]) -> str:
            async with near.session.post(near.url + CHAT, json=body_of(CHAT, turns)) as answer:
                assert answer.status == 200
                assert engine_turns(replica, CHAT) == turns
                return answer.headers["X-Warmroute-Replica"]

        name = await ask([LONG])
        assert await ask([LONG, SAID, NOW]) == name
        preparers = (one if one.url.endswith(name) else two).gateway.extensions.preparers
        preparers.insert(0, Preparer(lambda _exchange: True, _fails))
        assert await ask([LONG, SAID, NOW, SAID, NOW]) != name
        found = await near.metrics()
        assert found['warmroute_delta_requests_total{result="delta"}'] == 1
        assert found['warmroute_delta_requests_total{result="whole"}'] == 2


async def _fails(_exchange: Exchange) -> None:
    raise GatewayError(502, "broken", "no")


async def test_an_answer_that_breaks_off_is_not_acknowledged(tmp_path: Path) -> None:
    engines = [streams("hel", "lo"), streams("hel", "lo", die=True), streams("hel", "lo")]
    async with FakeReplica(engines) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(CHAT, [LONG], stream=True)
        known = len(two.form.heads)
        _, _, raw = await two.ask(CHAT, [LONG, SAID, NOW], stream=True)
        assert b"replica_failed" in raw
        assert len(two.form.heads) == known
        code, _, raw = await two.ask(CHAT, [LONG, SAID, NOW], stream=True)
        assert (code, raw.count(b"[DONE]")) == (200, 1)
        assert engine_turns(replica, CHAT) == [LONG, SAID, NOW]
        assert await two.counts() == {"whole": 1, "delta": 2}


async def test_a_large_conversation_is_outlined_by_the_parser_process(tmp_path: Path) -> None:
    turns: list[Any] = [{"role": "user", "content": f"{at}" * 9000} for at in range(40)]
    async with FakeReplica([answers()]) as replica, two_gateways(replica, tmp_path) as two:
        await two.ask(CHAT, turns)
        assert two.near.gateway.parsing.process.started == 1
        await two.ask(CHAT, [*turns, SAID, NOW])
        assert engine_turns(replica, CHAT) == [*turns, SAID, NOW]
        assert await two.counts() == {"whole": 1, "delta": 1}
        assert await two.bytes("sent") < 1.1 * len(json.dumps(turns))


async def test_a_text_as_input_begins_a_conversation(tmp_path: Path) -> None:
    async with FakeReplica([engine(RESPONSES, stream=False)]) as replica, two_gateways(replica, tmp_path) as two:
        headers = {"Authorization": "Bearer k"}
        async with two.near.session.post(
            two.near.url + RESPONSES, json={"model": "m", "input": "Hello"}, headers=headers
        ) as answer:
            assert answer.status == 200
        turns = [{"role": "user", "content": "Hello"}, SAID, NOW]
        await two.ask(RESPONSES, turns)
        assert texts(engine_turns(replica, RESPONSES)) == texts(turns)
        assert await two.counts() == {"whole": 1, "delta": 1}


async def test_messages_of_a_websocket_go_as_deltas(tmp_path: Path) -> None:
    """The client sends its new items only, and so does the gateway. The header is not for messages."""
    headers = {"Authorization": "Bearer k", "Prompt-Log": "keep"}
    async with FakeReplica([engine(RESPONSES, stream=True)]) as replica, two_gateways(replica, tmp_path) as two:
        async with dial(two.near, additional_headers=headers) as client:
            await send(client, input=[LONG], **FRAME[RESPONSES])
            messages = await answer(client)
            for _ in range(2):
                newest = messages[-1]["response"]
                await send(client, input=[NOW], previous_response_id=newest["id"], **FRAME[RESPONSES])
                messages = await answer(client)
        assert texts(engine_turns(replica, RESPONSES)) == texts([LONG, SAID, NOW, SAID, NOW])
        assert "prompt_log" not in newest
        assert await two.counts() == {"whole": 1, "delta": 2}
