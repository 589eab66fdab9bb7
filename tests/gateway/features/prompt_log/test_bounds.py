"""Logs at their bounds, and values that have no name."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import pytest

from gateway.errors import GatewayError
from gateway.features.histories.records import FoundTurn, StoredResponse, TurnNames
from gateway.features.prompt_log.base_phase import log_length
from gateway.features.prompt_log.bases import base_of
from gateway.features.prompt_log.header import MAX_BYTES, wishes_of
from gateway.features.prompt_log.job import appended, compute
from gateway.features.prompt_log.naming.answers import entries_in
from gateway.features.prompt_log.naming.canonical import MAX_DEPTH, NoNameError, canonical
from gateway.features.prompt_log.naming.chain import DIGEST, EMPTY, chains_of, head_name
from gateway.features.prompt_log.naming.entries import MAX_ENTRIES, OpenCalls
from gateway.features.prompt_log.naming.forms import log_in, names_in
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import CHAT
from tests.support.fakes import FakeReplica

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore


def chat(**message: Any) -> bytes:
    return json.dumps({"messages": [{"role": "assistant", **message}]}).encode()


def calling(arguments: str) -> bytes:
    return chat(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": arguments}}])


def test_a_log_of_100_000_entries_has_a_name_and_a_longer_one_has_none() -> None:
    turns = ",".join(['{"role":"user","content":"x"}'] * MAX_ENTRIES)
    assert names_in(b'{"messages":[%b]}' % turns.encode(), "chat").length == MAX_ENTRIES
    with pytest.raises(NoNameError):
        names_in(b'{"messages":[{"role":"user","content":"y"},%b]}' % turns.encode(), "chat")


def test_a_base_and_a_body_have_100_000_entries_together() -> None:
    most = bytes(DIGEST * MAX_ENTRIES)
    assert log_length(most, b"") == log_length(b"", most) == MAX_ENTRIES
    with pytest.raises(GatewayError) as caught:
        log_length(most, bytes(DIGEST))
    assert (caught.value.status, caught.value.code) == (400, "prompt_log_invalid")


def test_arguments_of_64_levels_have_a_name() -> None:
    log = log_in(calling("[" * 64 + "]" * 64), "chat")
    assert canonical(log.entries[0]["calls"][0]["arguments"]) == b"[" * 64 + b"]" * 64


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1030, 100_000])
def test_deeper_arguments_have_none(depth: int) -> None:
    with pytest.raises(NoNameError):
        names_in(calling("[" * depth + "]" * depth), "chat")


def test_a_deep_body_has_none() -> None:
    with pytest.raises(NoNameError):
        names_in(b'{"messages":' + b"[" * 100_000, "chat")


def test_a_hundred_thousand_members_have_a_name() -> None:
    members = {f"{number * 7919 % 100_003}\U0001f600": number for number in range(100_000)}
    written = canonical(members)
    assert json.loads(written) == members
    assert canonical(dict(reversed(members.items()))) == written


def test_arguments_with_millions_of_values_are_refused() -> None:
    with pytest.raises(NoNameError):
        names_in(calling("[" + "{}," * 600_000 + "{}]"), "chat")


@pytest.mark.parametrize("arguments", ["1e999", "-1e999", "1" * 400, "1" * 5000, r'"\ud83d"'])
def test_arguments_without_a_name(arguments: str) -> None:
    with pytest.raises(NoNameError):
        names_in(calling(arguments), "chat")


@pytest.mark.parametrize("arguments", ["", "NaN", "{", "{'a': 1}", "01"])
def test_arguments_that_are_no_json_are_a_text(arguments: str) -> None:
    assert log_in(calling(arguments), "chat").entries[0]["calls"] == [{"name": "f", "arguments": arguments}]


@pytest.mark.parametrize("key", ["a\ud83d", "\udc00"])
def test_half_a_pair_in_a_name_of_a_member(key: str) -> None:
    with pytest.raises(NoNameError):
        canonical({key: 1})


def test_members_are_sorted_by_utf_16() -> None:
    assert canonical({"\ufb33": 1, "\U0001f600": 2, "a": 3}) == '{"a":3,"\U0001f600":2,"\ufb33":1}'.encode()


WITHOUT_A_NAME: list[tuple[dict[str, Any], str, str]] = [
    ({"content": "\ud83d"}, "invalid_json", "invalid_json"),
    ({"content": "x", "n": 1e999}, "invalid_json", "invalid_json"),
    ({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": r'"\ud83d"'}}]}, "", "prompt_log_invalid"),
    ({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "1e999"}}]}, "", "prompt_log_invalid"),
]


@pytest.mark.parametrize(("member", "alone", "named"), WITHOUT_A_NAME)
async def test_the_errors_of_values_without_a_name(member: dict[str, Any], alone: str, named: str) -> None:
    """A body that is no JSON of the gateway's is refused in any case."""
    body = json.dumps({"model": "m", "messages": [{"role": "assistant", **member}, {"role": "user", "content": "hi"}]})
    body = body.replace("Infinity", "1e999")
    async with FakeReplica() as replica, running(replica) as run:
        for header, code in (({}, alone), ({"Prompt-Log": "name"}, named)):
            headers = {"Content-Type": "application/json", **header}
            async with run.session.post(f"{run.url}{CHAT}", data=body, headers=headers) as answer:
                found = (await answer.json()).get("error", {})
                assert (answer.status, found.get("code", ""), found.get("param")) == (400 if code else 200, code, None)


MALFORMED = [
    b"[]",
    b"{",
    b'{"messages":7}',
    b'{"messages":[7]}',
    b'{"messages":[{"content":"x"}]}',
    b'{"messages":[{"role":"user","content":7}]}',
    b'{"messages":[{"role":"user","content":[7]}]}',
    b'{"messages":[{"role":"user","content":[{"type":"text"}]}]}',
    b'{"messages":[{"role":"user","content":[{"type":7}]}]}',
    b'{"messages":[{"role":"assistant","tool_calls":[{}]}]}',
    b'{"messages":[{"role":"assistant","tool_calls":{}}]}',
    b'{"messages":[{"role":"assistant","reasoning":{"a":1}}]}',
    b'{"messages":[{"role":"assistant","content":[{"type":"thinking"}]}]}',
    b'{"messages":[{"role":"assistant","content":[{"type":"tool_use"}]}]}',
    b'{"messages":[{"role":"assistant","content":[{"type":"redacted_thinking","data":7}]}]}',
    b'{"messages":[{"role":"user","content":[{"type":"document","source":{"type":"text"}}]}]}',
    b'{"messages":[],"tools":{}}',
    b'{"messages":[],"system":7}',
    b'{"input":7}',
    b'{"input":[7]}',
    b'{"input":[{"type":7}]}',
    b'{"input":[{"type":"function_call"}]}',
    b'{"input":[{"type":"reasoning","summary":[7]}]}',
    b'{"input":[{"type":"item_reference","id":"x"}]}',
    b'{"input":"x","instructions":7}',
    b'{"input":"x","conversation":"conv_1"}',
]


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_body_is_refused_in_its_dialect(body: bytes) -> None:
    """In another one it may have a name. No dialect raises anything else."""
    refusals = {form for form in ("chat", "messages", "responses") if _is_refused(body, form)}
    assert refusals & ({"responses"} if b'"input"' in body else {"chat", "messages"})


def _is_refused(body: bytes, form: str) -> bool:
    try:
        names_in(body, form)
    except NoNameError:
        return True
    return False


OTHERS = [b"", b"[]", b"{}", b'{"choices":[]}', b'{"content":7}', b'{"output":[7]}', b'{"choices":{"0":1}}']


@pytest.mark.parametrize("body", OTHERS)
@pytest.mark.parametrize("form", ["chat", "messages", "responses"])
def test_an_answer_of_another_form_has_no_name(body: bytes, form: str) -> None:
    with pytest.raises(NoNameError):
        entries_in(body, form)


def test_a_job_says_which_member_has_no_name() -> None:
    with pytest.raises(GatewayError) as caught:
        compute(b'{"messages":[],"tools":[7]}', "chat")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "prompt_log_invalid", "tools")
    with pytest.raises(GatewayError) as caught:
        compute(b"[" + b"[]," * 600_000 + b"[]]", "chat")
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"form": ["chat"]}, "form"),
        ({"form": {}}, "form"),
        ({"ttl": True}, "ttl"),
        ({"form": "responses", "body": {"input": "x", "previous_response_id": "resp_1"}}, "previous_response_id"),
    ],
)
def test_a_request_that_appends_is_refused_by_its_member(more: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        appended(json.dumps({"form": "chat", "body": {}, **more}).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_header_has_a_kilobyte_at_most() -> None:
    assert wishes_of("name, x=" + "a" * (MAX_BYTES - 8)) is not None
    with pytest.raises(GatewayError):
        wishes_of("name, x=" + "a" * (MAX_BYTES - 7))


# -- results and their calls


def test_a_result_says_which_open_call_it_answers() -> None:
    calls = OpenCalls()
    for id_ in ("a", "b", "a", None, 7):
        calls.add(id_)
    assert [calls.answer(id_) for id_ in ("a", "a", None, "unknown", "b", "more")] == [0, 1, 1, 0, 0, 0]


def test_a_hundred_thousand_results_in_reverse() -> None:
    calls, count = OpenCalls(), 100_000
    for number in range(count):
        calls.add(str(number))
    assert all(calls.answer(str(number)) == number for number in reversed(range(count)))


class OneChain:
    """A store with one chain of turns."""

    def __init__(self, rows: list[StoredResponse]) -> None:
        self.rows = rows

    async def chain(self, _owner: str, _id: str, _max_bytes: int) -> list[StoredResponse]:
        return self.rows


@pytest.mark.timeout(120)  # a search that compares each entry with all others takes much longer
@pytest.mark.parametrize(("given", "answered"), [(0, 0), (3, 0), (3, 1), (1, 4), (3, 5), (0, 7), (1, 50_000), (50_000, 50_000)])
async def test_a_log_goes_on_from_the_input_of_an_answer_with_many_entries(given: int, answered: int) -> None:
    digests = [sha256(b"%d" % at).digest() for at in range(2 + given + answered)]
    chains = [EMPTY, *chains_of(b"".join(digests))]
    rows = [
        row_of(chains[1], chains[2], digests[:2]),
        row_of(chains[2 + given], chains[-1], digests[2:]),
    ]
    last = FoundTurn("", "responses", at_input=True, open=b"[]")
    base = await base_of(cast("TurnStore", OneChain(rows)), "o", last, 1 << 20)
    assert base.digests == b"".join(digests[: 2 + given])


def row_of(input_chain: bytes, chain: bytes, digests: list[bytes]) -> StoredResponse:
    names = TurnNames(
        head=head_name(chain), input_head=head_name(input_chain), form="responses", digests=b"".join(digests), open=b""
    )
    return StoredResponse(
        owner="o", id="", parent="", created_at=1.0, status="completed", input=b"1", output=b"2", response=b"", log=names
    )
