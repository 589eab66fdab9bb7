"""Work of the parser process on items: the same as in the event loop, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.features.histories import item_jobs
from gateway.features.histories.item_forms import input_items, listed, picked


def test_items_are_picked_as_in_the_loop() -> None:
    items = b'{"id":"a"},{"id":"b","n":[1]},{"role":"user"}'
    (found,) = item_jobs.pick(items, ["b", "never"], {"x": 2, "y": 3})
    assert found == picked(items, {"b", "never"}, {"x": 2, "y": 3}) == {"b": b'{"id":"b","n":[1]}', "x": b'{"role":"user"}'}


def test_items_are_listed_as_in_the_loop() -> None:
    items = b'{"id":"a","type":"reasoning"},{"id":"b","content":"x"}'
    assert item_jobs.enumerate_items(items, 2) == (listed(items, 2),)
    assert item_jobs.enumerate_items(items, 1) == (None,)
    ids, sizes, query = ["r"], [len(items), 0], {"limit": "1", "order": "asc"}
    assert item_jobs.page(items, ids, sizes, query) == (input_items(items, ids, sizes, query),)
    with pytest.raises(GatewayError) as refused:
        item_jobs.page(items, ids, sizes, {"after": "never"})
    assert (refused.value.status, refused.value.param) == (400, "after")


JOBS: dict[str, Callable[[bytes], Any]] = {
    "pick": lambda items: item_jobs.pick(items, ["a"], {}),
    "list": lambda items: item_jobs.enumerate_items(items, 5),
    "page": lambda items: item_jobs.page(items, ["r"], [len(items), 0], {}),
}


@pytest.mark.parametrize("job", JOBS)
def test_items_of_too_many_values_are_refused_before_they_are_built(job: str) -> None:
    items = b'{"id":"a","x":[%b0]}' % (b"0," * item_jobs.MAX_ITEM_VALUES)
    with pytest.raises(GatewayError) as refused:
        JOBS[job](items)
    assert (refused.value.status, refused.value.code) == (413, "too_large")
