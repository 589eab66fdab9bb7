"""Input items that the gateway finds by their ids, through a whole gateway and the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.features.histories.item_forms import name_at
from gateway.parser.parsing import INLINE_BYTES
from tests.gateway.conftest import eventually, running
from tests.gateway.features.responses.test_recall import ask, kept_in, replica, texts


def reference(id_: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": id_}


@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_written_out_and_kept_so(tmp_path: Path, stream: bool) -> None:
    async with replica() as one, replica() as two, running(one, two, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a", stream=stream)
        page = await run.client.responses.input_items.list(first.id)
        asked = [reference(page.data[0].id or ""), {"id": first.output[0].id}, {"role": "user", "content": "b"}]
        second = await ask(run, asked, stream=stream)
        last = max((each.json for each in (*one.requests, *two.requests)), key=lambda each: len(texts(each)))
        assert texts(last) == ["a", "to a", "b"]
        assert last["input"][1]["role"] == "assistant"
        await run.client.responses.delete(first.id)
        third = await ask(run, "c", stream=stream, previous_response_id=second.id)
        last = max((each.json for each in (*one.requests, *two.requests)), key=lambda each: len(texts(each)))
        assert texts(last) == ["a", "to a", "b", "to b", "c"], "it needs the first response no more"
        unkept = await ask(run, [reference(third.output[0].id)], stream=stream, store=False)
        assert (unkept.store, unkept.output_text) == (False, "to to c")


async def test_those_of_conversations_and_beside_a_history(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        made = await run.client.conversations.create(items=[{"role": "user", "content": "a"}])
        items = await run.client.conversations.items.list(made.id)
        first = await ask(run, "x")
        await ask(run, [reference(items.data[0].id or ""), {"role": "user", "content": "b"}], previous_response_id=first.id)
        assert texts(one.requests[-1].json) == ["x", "to x", "a", "b"]


async def test_a_large_body_with_one_is_read_by_the_parser_process(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        large = "x" * (INLINE_BYTES + 10)
        await ask(run, [{"role": "user", "content": large}, reference(first.output[0].id)])
        assert texts(one.requests[-1].json) == [large, "to a"]


async def test_those_of_a_large_response_are_found_by_the_parser_process(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        large = {"role": "user", "content": "x" * (INLINE_BYTES + 10)}
        first = await ask(run, [large, {"role": "user", "content": "a"}])
        asked = reference(f"msg_{name_at(first.id, 1, made=False)}")
        await run.gateway.parsing.process.close()  # what follows is small but for what it refers to
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(run, [asked], client=run.client.with_options(max_retries=0))
        assert caught.value.code == "shutting_down"
        assert len(one.requests) == 1


async def test_unknown_ones_are_not_found(tmp_path: Path) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a")
        other = run.client.with_options(api_key="another")
        for client, id_ in ((run.client, "msg_never"), (other, first.output[0].id)):
            with pytest.raises(openai.NotFoundError, match=f"Item with id '{id_}' not found") as caught:
                await ask(run, [reference(id_)], client=client)
            assert (caught.value.code, caught.value.param) == ("item_not_found", "input")
        with pytest.raises(openai.BadRequestError):
            await ask(run, [reference("a")] * 1001)
        assert len(one.requests) == 1


async def test_without_a_store_they_are_the_replicas() -> None:
    async with replica() as one, running(one) as run:
        body = {"model": "m", "input": [{**reference("m1"), "content": "as it is"}]}
        assert (await run.post(body, "/v1/responses"))[0] == 200
        assert one.requests[-1].json == body


async def test_one_item_that_is_meant_many_times_has_a_bound(tmp_path: Path) -> None:
    """It is read once and written out each time."""
    limits = {"body_mb": 1, "drain_timeout_s": 1}
    async with replica() as one, running(one, state=kept_in(tmp_path), limits=limits) as run:
        large: Any = {"role": "user", "content": "x" * 20_000}
        made = await run.client.conversations.create(items=[large])
        (item,) = (await run.client.conversations.items.list(made.id)).data
        with pytest.raises(openai.APIStatusError, match="referenced by 'input' have") as caught:
            await ask(run, [reference(item.id or "")] * 500)
        assert (caught.value.status_code, caught.value.code) == (413, "history_too_large")
        assert one.requests == []
        await ask(run, [reference(item.id or "")] * 20)
        assert len(texts(one.requests[-1].json)) == 20
        await eventually(lambda: run.gateway.served.memory.held == 0)
