"""Replicas with cache events behind a gateway, over real sockets: what others put there is predicted, block by block."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from gateway.features.kv_events.following import PublisherSet
from gateway.features.kv_events.metrics import KvEventMetrics
from gateway.features.kv_events.ordering import LIVE
from gateway.features.kv_events.stream import FULL
from replica.api.server import ServerConfig
from replica.api.transfer import Role, TransferConfig
from replica.cache.kv_events import EventsConfig, KvEventPublisher
from replica.sim.cost import SimConfig
from router import token_bytes
from router.residency import PromptTokens, Residency
from tests.gateway.conftest import Running, config_over, eventually, running
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import WatchedEngine

BLOCK = 16


@dataclass
class Engine:
    """A simulated replica that publishes its events."""

    replica: Replica
    publisher: KvEventPublisher

    @property
    def name(self) -> str:
        return self.replica.url.removeprefix("http://")

    async def compute(self, text: str) -> int:
        """A prompt that is sent to it directly: its cached tokens."""
        status, answer, _ = await self.replica.post("/v1/chat/completions", {"model": "sim", **chat(text)})
        assert status == 200, answer
        usage: Any = answer["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


@contextlib.asynccontextmanager
async def engine(kv_tokens: int = 8000, *, events: bool = True, role: Role | None = None) -> AsyncIterator[Engine]:
    publisher = KvEventPublisher(EventsConfig("tcp://*:0", "tcp://*:0"), BLOCK)
    source = {
        **publisher.source(),
        "endpoint": publisher.endpoint.replace("0.0.0.0", "*"),
        "replay_endpoint": (publisher.replay_endpoint or "").replace("0.0.0.0", "*"),
    }
    config = SimConfig(kv_tokens=kv_tokens, block_size=BLOCK, prefill_rate=1e6, decode_rate=2000.0, max_batch=64)
    with contextlib.closing(publisher):
        watched = WatchedEngine(config, listeners=[publisher])
        transfers = TransferConfig(role, token_s=1e-6) if role else None
        async for replica in serve(watched, None, ServerConfig(events=[source] if events else [], transfers=transfers)):
            yield Engine(replica, publisher)


@contextlib.asynccontextmanager
async def fleet(*engines: Engine, **config: Any) -> AsyncIterator[Running]:
    """A gateway that follows these engines. It waits for token ids as long as a test may take."""
    section, shown = {"follow": True, "wait_ms": 10_000, **config}, {"expose_headers": "all"}
    async with running(*(each.replica.url for each in engines), kv_events=section, routing=shown) as run:
        await caught_up(run, *engines)
        yield run


async def caught_up(run: Running, *engines: Engine) -> None:
    """Everything that the engines have published so far is known."""
    following = run.gateway[PublisherSet]

    def done() -> bool:
        following.sweep(following._core.clock())
        streams = following.residency.replicas
        return all(
            each.name in streams
            and not each.publisher._queue
            and streams[each.name][0].ordering.number == each.publisher._sequence - 1
            and streams[each.name][0].ordering.state == LIVE
            for each in engines
        )

    await eventually(done)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}


def text(name: str, words: int = 300) -> str:
    return " ".join(f"{name}{number}" for number in range(words))


def tokenized(metrics: KvEventMetrics) -> float:
    """Number of prompts whose ids have come from an engine."""
    return sum(metrics.tokenize.values[()][:-1])


async def ask(run: Running, content: str, **more: Any) -> tuple[str, int, int]:
    """(replica, predicted, reported cached tokens) of a prompt through the gateway."""
    status, headers, answer = await run.post({"model": "sim", **chat(content, **more)})
    assert status == 200, answer
    reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return headers["x-warmroute-replica"], int(headers["x-warmroute-cached-tokens"]), reported


async def test_blocks_that_others_put_there_are_predicted() -> None:
    async with engine() as left, engine() as right:
        await left.compute(text("early"))
        async with fleet(left, right) as run:
            assert await ask(run, text("early")) == (left.name, *[await left.compute(text("early"))] * 2), "replayed"
            for each in (right, left):
                content = text(f"direct to {each.name}")
                await each.compute(content)
                await caught_up(run, left, right)
                replica, predicted, reported = await ask(run, content + " and more")
                assert replica == each.name
                assert predicted == reported > 500
            assert (await run.metrics())['warmroute_kv_events_prompts_total{source="engine"}'] == 3


async def test_evicted_blocks_are_no_longer_predicted() -> None:
    async with engine(kv_tokens=2000) as only, fleet(only) as run:
        first = text("first")
        await ask(run, first)
        await caught_up(run, only)
        assert (await ask(run, first))[1] > 500
        for number in range(4):
            await only.compute(text(f"other{number}"))
        await caught_up(run, only)
        _, predicted, reported = await ask(run, first)
        assert predicted == reported < 500


async def test_predicted_equals_reported_with_evictions_and_foreign_requests() -> None:
    async with engine(kv_tokens=4000) as left, engine(kv_tokens=4000) as right, fleet(left, right) as run:
        turns = [text("a", 60), text("b", 90), text("c", 130)]
        for number in range(30):
            at = number % len(turns)
            turns[at] += f" turn {number} " + text(f"t{number}", 12)
            if number % 4 == 3:
                await (left if number % 8 == 3 else right).compute(text(f"foreign{number}", 250))
            await caught_up(run, left, right)
            _, predicted, reported = await ask(run, turns[at])
            assert predicted == reported, number
        counts = {name: value for name, value in (await run.metrics()).items() if "_kv_events_predictions" in name}
        assert sum(counts.values()) >= 28, "all but the first of each engine, whose block size is not known yet"
        assert {name for name, value in counts.items() if value and "exact" not in name} == set()


async def test_a_reset_cache_is_no_longer_predicted() -> None:
    async with engine() as only, fleet(only) as run:
        content = text("reset")
        await ask(run, content)
        await only.replica.post("/reset_prefix_cache", {})
        await caught_up(run, only)
        await eventually(lambda: run.gateway.router.held_tokens(only.name) == 0)
        assert (await ask(run, content))[1:] == (0, 0)


@pytest.mark.parametrize("decoder_has_events", [True, False])
async def test_a_prefiller_is_chosen_by_its_events(decoder_has_events: bool) -> None:
    async with (
        engine(role="prefill") as left,
        engine(role="prefill") as right,
        engine(role="decode", events=decoder_has_events) as decoder,
    ):
        pool = {"prefill": [left.replica.url, right.replica.url], "decode": [decoder.replica.url]}
        section, shown = {"follow": True, "wait_ms": 10_000}, {"expose_headers": "all"}
        async with running(pools=[pool], kv_events=section, routing=shown, disaggregation={"local_tokens": 0}) as run:
            for each in (right, left):
                content = text(f"direct to {each.name}")
                await each.compute(content)
                await caught_up(run, left, right, *([decoder] if decoder_has_events else []))
                _, predicted, reported = await ask(run, content + " and more")
                assert predicted == reported > 500
            counts = await run.metrics()
    assert not any("_kv_events_predictions" in name for name in counts), "of a decoder they would be about the prefiller"


async def test_salts_separate_prompts() -> None:
    async with engine() as only, fleet(only) as run:
        content = text("salted")
        await ask(run, content, cache_salt="one")
        await caught_up(run, only)
        assert (await ask(run, content, cache_salt="two"))[1:] == (0, 0)
        await caught_up(run, only)
        _, predicted, reported = await ask(run, content, cache_salt="one")
        assert predicted == reported > 500


async def test_prompts_of_token_ids_need_no_tokenizer() -> None:
    async with engine() as only, fleet(only) as run:
        ids = list(range(1000, 1400))
        body = {"model": "sim", "prompt": ids, "max_tokens": 1}
        await only.replica.post("/v1/completions", body)
        await caught_up(run, only)
        _, headers, answer = await run.post(body, path="/v1/completions")
        assert int(headers["x-warmroute-cached-tokens"]) == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
        assert (await run.metrics())['warmroute_kv_events_prompts_total{source="sent"}'] == 1


async def test_without_time_for_tokens_history_and_the_ids_of_earlier_turns_decide() -> None:
    async with engine() as left, engine() as right, fleet(left, right, wait_ms=0) as run:
        metrics = run.gateway.metrics.of(KvEventMetrics)
        content = text("history")
        replica, predicted, _ = await ask(run, content)
        assert predicted == 0
        await eventually(lambda: tokenized(metrics) == 1)
        await caught_up(run, left, right)
        again, predicted, reported = await ask(run, content + " more")
        assert again == replica
        assert 0 < predicted <= reported + BLOCK
        await ask(run, content)
        assert metrics.prompts.values == {("late",): 1, ("prefix",): 1, ("cache",): 1}


@pytest.mark.parametrize("sign", ["its cache is lost", "another process"])
async def test_a_replica_that_may_hold_other_blocks_is_followed_anew(sign: str) -> None:
    async with engine() as only, fleet(only) as run:
        await ask(run, text("before"))
        await caught_up(run, only)
        following = run.gateway[PublisherSet]
        (state,), (stream,) = run.gateway.fleet.replicas, following.residency.replicas[only.name]
        stream.holdings.clear(complete=False)  # what a replay from the beginning restores
        if sign == "another process":
            state.up_since = 1.0
        else:
            run.gateway.router.restarted(only.name)

        def is_known() -> bool:
            following.sweep(0.0)
            return stream.holdings.complete and stream.holdings.blocks > 30

        await eventually(is_known)


async def test_a_replica_that_has_left_is_followed_no_longer() -> None:
    async with engine() as stays, engine() as leaves, fleet(stays) as run:
        pool = run.gateway.fleet.pools[0].name
        added = {"url": leaves.replica.url, "pool": pool}
        async with run.session.post(run.admin_url + "/warmroute/replicas", json=added) as answer:
            assert answer.status < 300
        await caught_up(run, stays, leaves)
        async with run.session.delete(f"{run.admin_url}/warmroute/replicas/{leaves.name}") as answer:
            assert answer.status < 300
        following = run.gateway[PublisherSet]

        def is_left() -> bool:
            following.sweep(following._core.clock())
            return following.residency.replicas.keys() == {stays.name}

        await eventually(is_left)


class AskedResidency(Residency):
    """Knows nothing, and notes the ids of the last prompt."""

    def __init__(self) -> None:
        self.ids = b""

    def held(self, tokens: PromptTokens, replica: str) -> None:
        self.ids = tokens.data


async def test_the_end_of_an_earlier_prompt_is_not_taken_for_a_part_of_this_one() -> None:
    """Only whole blocks of text are compared: what follows them in the ids of the earlier prompt may be anything."""
    async with engine() as only, fleet(only, wait_ms=0) as run:
        metrics, asked = run.gateway.metrics.of(KvEventMetrics), AskedResidency()
        run.gateway.router.residency = asked
        found = 0
        for more in range(0, 256, 32):  # for some of them the last block of text has nearly ended
            known, earlier = tokenized(metrics), text(f"earlier{more}") + "." * more
            await ask(run, earlier)
            await eventually(lambda: tokenized(metrics) > known)  # noqa: B023
            later = earlier[:-150] + " and another end"
            await ask(run, later)
            if metrics.prompts.values.get(("prefix",), 0) > found:
                found += 1
                answer: Any = (await only.replica.post("/tokenize", {"model": "sim", **chat(later)}))[1]
                assert token_bytes(answer["tokens"]).startswith(asked.ids), more
        assert found


async def test_a_model_that_no_replica_knows_ends_no_tokenizing() -> None:
    async with engine() as only:
        pool = {"name": "all", "models": ["sim", "other-"], "replicas": [{"url": only.replica.url}]}
        async with running(pools=[pool], kv_events={"follow": True, "wait_ms": 10_000}) as run:
            await caught_up(run, only)
            assert (await run.post({"model": "other-one", **chat(text("other"))}))[0] == 404
            assert (await run.post({"model": "sim", **chat(text("own"))}))[0] == 200
            assert (await run.metrics())['warmroute_kv_events_prompts_total{source="engine"}'] == 1


async def test_metrics_and_the_operators_view() -> None:
    async with engine() as only, fleet(only) as run:
        await only.compute(text("seen"))
        await caught_up(run, only)
        status, _, raw = await run.get("/warmroute/kv_events")
        assert status == 200
        (row,) = msgspec.json.decode(raw)["publishers"]
        assert (row["replica"], row["state"], row["complete"], row["block_tokens"]) == (only.name, LIVE, True, BLOCK)
        assert row["blocks"]["gpu"] > 30
        metrics = await run.metrics()
        assert metrics[f'warmroute_kv_events_followed{{replica="{only.name}"}}'] == 2
        assert metrics[f'warmroute_kv_events_blocks{{replica="{only.name}",tier="gpu"}}'] == row["blocks"]["gpu"]
        assert metrics[f'warmroute_kv_events_blocks_total{{replica="{only.name}"}}'] == row["blocks"]["gpu"]
        (stream,) = run.gateway[PublisherSet].residency.replicas[only.name]
        stream.overflow(time.monotonic())
        (row,) = msgspec.json.decode((await run.get("/warmroute/kv_events"))[2])["publishers"]
        followed = (await run.metrics())[f'warmroute_kv_events_followed{{replica="{only.name}"}}']
        assert (row["state"], followed) == (FULL, 0)
        following, lets = run.gateway[PublisherSet], threading.Event()
        receiver = following._receiver
        assert receiver is not None

        def waits() -> None:
            lets.wait()

        receiver._command(waits)
        await run.gateway.local.reload.take(config_over("http://127.0.0.1:9", kv_events={"follow": True, "wait_ms": 10_000}))
        following.sweep(0.0)
        following.set_gauges()  # its thread still follows
        lets.set()
        await eventually(lambda: not receiver.streams)
        following.sweep(0.0)
        after = await run.metrics()
        assert not any(name.startswith("warmroute_kv_events_followed") for name in after)
        counter = f'warmroute_kv_events_blocks_total{{replica="{only.name}"}}'
        assert after[counter] == metrics[counter], "its blocks are counted once"
