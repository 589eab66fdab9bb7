"""Input items that are ids of items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.responses.responses import Responses
from gateway.errors import GatewayError
from gateway.features.histories.history import History, written_out
from gateway.features.histories.references import MAX_REFERENCES, references_in

MESSAGE = {"role": "user", "content": "hi"}


def body(items: Any) -> bytes:
    return json.dumps({"model": "m", "input": items, "x": 1.0}, indent=1).encode()


@pytest.mark.parametrize(
    ("items", "ids"),
    [
        ("hi", []),
        ([], []),
        ([MESSAGE, {"type": "message", "id": "m1", **MESSAGE}], []),
        ([{"type": "function_call", "id": "fc1", "name": "f", "arguments": "{}", "call_id": "c"}], []),
        ([{"type": "item_reference", "id": "m1"}, MESSAGE, {"id": "m2"}], ["m1", "m2"]),
        ([MESSAGE, {"type": None, "id": "m3"}, {"id": "m3"}], ["m3", "m3"]),
        ([{"id": "\\" * 256}], ["\\" * 256]),
    ],
)
def test_they_are_found_and_the_request_says_that_it_has_some(items: Any, ids: list[str]) -> None:
    raw = body(items)
    assert [id_ for _, _, id_ in references_in(raw)] == ids
    assert Responses().parse(raw).references == bool(ids)


def test_they_are_replaced_and_no_other_byte_changes() -> None:
    raw = body([{"id": "m1"}, MESSAGE, {"type": "item_reference", "id": "m2"}])
    history = History(read_object(raw))
    items = {"m1": b'{"one":1}', "m2": b'{"two":2}'}
    history.resolve(apply(*history.referring(references_in(raw), items)))
    said = json.dumps(MESSAGE, indent=1).replace("\n", "\n  ").encode()
    assert history.own == b'{"one":1},\n  %b,\n  {"two":2}' % said
    found = json.loads(apply(raw, written_out(history, [b'{"before":0}'])))
    assert found["input"] == [{"before": 0}, {"one": 1}, MESSAGE, {"two": 2}]
    assert json.loads(apply(raw, written_out(history, [])))["input"] == [{"one": 1}, MESSAGE, {"two": 2}]


@pytest.mark.parametrize("item", [{"id": 7}, {"id": ""}, {"id": "x" * 257}, {"type": "item_reference"}])
def test_what_is_no_id_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(GatewayError) as caught:
        references_in(body([MESSAGE, item]))
    assert (caught.value.status, caught.value.param) == (400, "input[1].id")


def test_there_are_only_so_many() -> None:
    assert len(references_in(body([{"id": "a"}] * MAX_REFERENCES))) == MAX_REFERENCES
    with pytest.raises(GatewayError, match="at most"):
        references_in(body([{"id": "a"}] * (MAX_REFERENCES + 1)))
