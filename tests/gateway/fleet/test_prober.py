"""What engines report of themselves reaches the router, and a lost cache is noticed, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from bench.measure.ports import free_port
from gateway.errors import ReplicaFailure
from gateway.fleet.cache_reports import ENOUGH_REQUESTS
from gateway.fleet.engine_client import MAX_MODELS
from gateway.fleet.prober import RARELY
from router import Replica
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, dies, http, models, status, writes

STARTED = 1_795_000_000.0
LONG = {"model": "m", "messages": [{"role": "user", "content": "All of it again, word by word. " * 300}]}
LONG_TOKENS = 2400
BODY_TOKENS = 300


def page(text: str) -> Behaviour:
    return writes(http(200, text.encode(), "text/plain; version=0.0.4"))


def vllm(kv: int | None = None, started: float | None = None, active: int = 0) -> Behaviour:
    waiting = active + 1 if active else 0
    lines = [f'vllm:num_requests_running{{engine="0"}} {active}.0', f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0']
    if kv is not None:
        lines.append(f'vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{kv}"}} 1.0')
    if started is not None:
        lines.append(f"process_start_time_seconds {started!r}")
    return page("\n".join(lines) + "\n")


def engine(owner: str = "vllm", **pages: Behaviour) -> FakeReplica:
    """A replica whose engine answers these: `metrics`, `props`, `v1_loads`."""
    return FakeReplica(
        [answers(prompt=BODY_TOKENS)],
        listing=models("m", owner=owner),
        pages={"/" + name.replace("_", "/"): pages[name] for name in pages},
    )


async def look(run: Running, probes: int = 1) -> None:
    """Probe every replica now, one after the other."""
    for _ in range(probes):
        await run.gateway.fleet.probe_all(run.gateway.upstream)


def capacity(run: Running, replica: FakeReplica) -> int | None:
    return run.gateway.router.replicas[replica.name].capacity_tokens


def held(run: Running, replica: FakeReplica) -> int:
    return run.gateway.router.trie.held()[replica.name]


async def row(run: Running) -> dict[str, Any]:
    (only,) = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
    assert isinstance(only, dict)
    return only


async def restarts(run: Running, replica: FakeReplica) -> dict[str, float]:
    """By the first sign of them."""
    found = await run.metrics()
    name = 'warmroute_replica_restarts_total{{reason="{}",replica="{}"}}'
    return {sign: found[name.format(sign, replica.name)] for sign in ("refused", "start_time", "zero_hits")}


def lines(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.message == message]


# -- capacity


async def test_the_engines_kv_size_bounds_what_it_is_believed_to_hold(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    async with engine(metrics=vllm(kv=128)) as replica, running(replica) as run:
        await run.post()
        assert (capacity(run, replica), held(run, replica)) == (128, 2)
        await look(run)
        logged = lines(caplog, "replica reports the size of its KV cache")
        assert [(line["levelname"], line["engine"], line["capacity_tokens"]) for line in logged] == [("INFO", "vllm", 128)]
        replica.pages["/metrics"] = vllm(kv=640)
        await look(run)
        await run.post()
        assert (capacity(run, replica), held(run, replica)) == (640, 4)
        assert (await run.metrics())[f'warmroute_replica_capacity_tokens{{replica="{replica.name}"}}'] == 640
        assert (await row(run))["capacity_tokens"] == 640
        replica.pages["/metrics"] = vllm(kv=None)
        await look(run)
        assert capacity(run, replica) == 640, "what is no longer reported is not forgotten"


async def test_the_configuration_knows_better(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    async with engine(metrics=vllm(kv=128)) as replica:
        pool = {"replicas": [{"url": replica.url, "capacity_tokens": 1000}]}
        async with running(pools=[pool]) as run:
            await run.post()
            assert (capacity(run, replica), held(run, replica)) == (1000, 4)
            assert not lines(caplog, "replica reports the size of its KV cache")
            listed = await row(run)
            assert (listed["capacity_tokens"], listed["engine_kv_tokens"]) == (1000, 128)
            assert (await run.metrics())[f'warmroute_replica_capacity_tokens{{replica="{replica.name}"}}'] == 1000


IN_ENGINE_BLOCKS = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="400"} 1.0\n'


@pytest.mark.parametrize("metrics", [vllm(kv=6400), page(IN_ENGINE_BLOCKS)], ids=["in tokens", "in engine blocks"])
@pytest.mark.parametrize(("block_bytes", "blocks"), [(256, 100), (1024, 25)])
async def test_a_capacity_is_a_number_of_our_own_blocks_of_text(block_bytes: int, blocks: int, metrics: Behaviour) -> None:
    prompts = [{**LONG, "messages": [{"role": "user", "content": f"{n} {'word ' * 1000}"}]} for n in range(8)]
    replica = engine(metrics=metrics)
    replica.script = (answers(prompt=1250),)
    async with replica, running(replica, routing={"block_bytes": block_bytes}) as run:
        assert capacity(run, replica) == 6400
        for prompt in prompts:
            await run.post(prompt)
        assert held(run, replica) == blocks


def listing(**lengths: object) -> Behaviour:
    """Models with these fields `max_model_len`."""
    entries = [{"id": name, "object": "model", "owned_by": "vllm", "max_model_len": length} for name, length in lengths.items()]
    return writes(http(200, json.dumps({"object": "list", "data": entries}).encode()))


async def test_the_longest_context_of_a_replicas_models_is_its_longest_prompt() -> None:
    async with engine(metrics=vllm(kv=6400)) as replica:
        replica.listing = listing(m=1000, long=4000, adapter=None, odd="9000")
        async with running(replica) as run:
            assert run.gateway.router.replicas[replica.name] == Replica(replica.name, 6400, 4000, pool="default")
            await run.post()
            before = held(run, replica)
            replica.listing = models("m")
            await look(run)
            assert run.gateway.router.replicas[replica.name] == Replica(replica.name, 6400, None, pool="default")
            assert held(run, replica) == before > 0, "nothing is forgotten for it"


async def test_of_a_model_list_no_more_is_kept_than_so_many_names_that_a_request_may_have() -> None:
    async with engine() as replica, running(replica) as run:
        replica.listing = models("x" * 257, *(f"m{number}" for number in range(MAX_MODELS + 50)))
        await look(run)
        (state,) = run.gateway.fleet.replicas
        assert list(state.models) == [f"m{number}" for number in range(MAX_MODELS)]
        replica.listing = writes(http(200, b'{"data": [{"id": "m", "x": [' + b"[]," * 200_000 + b"[]]}]}"))
        await look(run, 3)
        assert (state.up, state.down_by) == (False, "garbage")


async def test_sglang_is_asked_further_and_llamacpps_slots_bound_nothing() -> None:
    loads = writes(http(200, b'{"loads": [{"dp_rank": 0, "max_total_num_tokens": 4096}]}'))
    async with engine("sglang", v1_loads=loads) as replica, running(replica) as run:
        assert (capacity(run, replica), replica.asked[:2]) == (4096, ["/metrics", "/v1/loads"])
    props = writes(http(200, b'{"default_generation_settings": {"n_ctx": 4096}, "total_slots": 2}'))
    async with engine("llamacpp", props=props) as replica, running(replica) as run:
        assert (capacity(run, replica), (await row(run))["engine_kv_tokens"]) == (None, 8192)
        assert f'warmroute_replica_capacity_tokens{{replica="{replica.name}"}}' not in await run.metrics()


async def test_an_inquiry_is_made_once_and_repeated_rarely_where_it_failed() -> None:
    props = writes(http(200, b'{"default_generation_settings": {"n_ctx": 4096}, "total_slots": 2}'))
    page_of_llama = page("llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n")
    async with engine("llamacpp", metrics=page_of_llama) as replica, running(replica) as run:
        await look(run, RARELY - 1)
        assert (replica.asked.count("/metrics"), replica.asked.count("/props")) == (RARELY, 1)
        replica.pages["/props"] = props
        await look(run)
        assert (await row(run))["engine_kv_tokens"] == 8192
        await look(run, 2 * RARELY)
        assert replica.asked.count("/props") == 2


async def test_a_replica_that_comes_back_is_asked_anew() -> None:
    def loads(tokens: int) -> Behaviour:
        return writes(http(200, b'{"loads": [{"max_total_num_tokens": %d}]}' % tokens))

    async with engine("sglang", v1_loads=loads(4096)) as replica, running(replica) as run:
        listing, replica.listing = replica.listing, status(503)
        await look(run, 2)
        replica.listing, replica.pages["/v1/loads"] = listing, loads(8192)
        await look(run)
        assert capacity(run, replica) == 8192


# -- what runs and waits in the engine


async def test_what_runs_and_waits_is_shown_as_long_as_it_is_reported() -> None:
    async with engine("somebody", metrics=vllm(active=3)) as replica, running(replica) as run:
        label = f'{{replica="{replica.name}"}}'
        listed = await row(run)
        assert (listed["engine"], listed["engine_running"], listed["engine_waiting"]) == ("vllm", 3, 4)
        replica.pages["/metrics"] = vllm(active=5)
        await look(run)
        metrics = await run.metrics()
        assert metrics["warmroute_replica_engine_running" + label] == 5
        assert metrics["warmroute_replica_engine_waiting" + label] == 6
        del replica.pages["/metrics"]
        await look(run)
        listed = await row(run)
        assert (listed["up"], listed["engine_running"]) == (True, None)
        assert "warmroute_replica_engine_running" + label not in await run.metrics()
        replica.pages["/metrics"] = vllm(active=5)
        await look(run, RARELY)
        assert (await row(run))["engine_running"] == 5
        await replica.stop()
        await look(run)
        assert "warmroute_replica_engine_waiting" + label not in await run.metrics()


async def test_an_engine_that_others_use_is_asked_for_its_load_between_two_probes() -> None:
    async with engine(metrics=vllm(active=3)) as replica, running(replica, health={"interval_s": 600}):
        await eventually(lambda: replica.asked.count("/metrics") > 3)


async def test_what_is_reported_after_a_refusal_is_not_taken_up() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def late(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await answer.wait()
        await vllm(kv=128, started=STARTED)(request, writer)

    async with engine(metrics=vllm()) as replica, running(replica) as run:
        (state,) = run.gateway.fleet.replicas
        replica.pages["/metrics"] = late
        probing = asyncio.create_task(look(run))
        await asked.wait()
        replica.listing = status(503)  # to the probe that follows
        run.gateway.fleet.failed(state, ReplicaFailure("refused", "nobody listens"))
        answer.set()
        await probing
        assert (state.up, state.started, capacity(run, replica)) == (False, None, None)
        assert f'warmroute_replica_engine_running{{replica="{replica.name}"}}' not in await run.metrics()


async def endless(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        writer.write(b"# nothing\n" * 10_000)
        await writer.drain()


async def silent(_request: FakeRequest, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


BAD_PAGES = [
    status(404),
    status(501),
    dies,
    endless,
    silent,
    writes(b"garbage\r\n\r\n"),
    page("<html>no</html>"),
    page('vllm:cache_config_info{kv_cache_size_tokens="NaN"} 1\nprocess_start_time_seconds -1\n'),
    page("vllm:num_requests_running{ 1e999\n"),
    writes(http(503, b'vllm:cache_config_info{kv_cache_size_tokens="128"} 1\nvllm:num_requests_running 1\n', "text/plain")),
    writes(http(200, b"\x00\xff\xfe" * 1000, "text/plain")),
    writes(http(200, b'vllm:cache_config_info{kv_cache_size_tokens="128"} 1\n' * 200_000, "text/plain")),
]


@pytest.mark.parametrize("bad", BAD_PAGES)
async def test_a_bad_page_is_no_failed_probe(bad: Behaviour) -> None:
    quick = {"interval_s": 60, "timeout_s": 0.5}
    async with engine(metrics=bad) as replica, running(replica, health=quick) as run:
        listed = await row(run)
        assert (listed["up"], listed["error"], listed["capacity_tokens"], listed["engine_running"]) == (True, "", None, None)
        assert (await run.post())[0] == 200


async def test_an_engine_without_metrics_is_asked_rarely() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        await look(run, 2 * RARELY)
        assert replica.asked == ["/metrics"] * 3


# -- restarts


async def test_a_later_start_of_the_process_is_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    async with engine(metrics=vllm(started=STARTED)) as replica, running(replica) as run:
        await run.post()
        for drifted in (STARTED + 1.5, STARTED - 100, STARTED + 3):
            replica.pages["/metrics"] = vllm(started=drifted)
            await look(run)
            assert held(run, replica) > 0
        replica.pages["/metrics"] = vllm(started=STARTED + 60)
        await look(run, 2)
        assert held(run, replica) == 0
        assert await restarts(run, replica) == {"refused": 0, "start_time": 1, "zero_hits": 0}
        (line,) = lines(caplog, "replica restarted")
        assert (line["replica"], line["reason"]) == (replica.name, "start_time")


async def test_a_replica_that_was_down_and_comes_back_with_a_later_start_has_restarted() -> None:
    async with engine(metrics=vllm(started=STARTED)) as replica, running(replica) as run:
        await run.post()
        listing, replica.listing = replica.listing, status(503)
        await look(run, 2)
        assert ((await row(run))["up"], held(run, replica) > 0) == (False, True), "it may only have been busy"
        replica.listing, replica.pages["/metrics"] = listing, vllm(started=STARTED + 60)
        await look(run)
        assert ((await row(run))["up"], held(run, replica)) == (True, 0)
        assert (await restarts(run, replica))["start_time"] == 1


async def test_a_restart_that_was_seen_as_a_refusal_counts_once() -> None:
    made = engine(metrics=vllm(started=STARTED))
    made.port = free_port()  # it comes back there
    async with made as replica, running(replica) as run:
        await run.post()
        await replica.stop()
        (state,) = run.gateway.fleet.replicas
        await eventually(lambda: not state.up)  # by the end of its idle connections
        await look(run, 3)
        assert held(run, replica) == 0
        replica.pages["/metrics"] = vllm(started=STARTED + 60)
        async with replica:
            await look(run)
            await run.post()
            await look(run)
            assert held(run, replica) > 0
            assert await restarts(run, replica) == {"refused": 1, "start_time": 0, "zero_hits": 0}
            replica.pages["/metrics"] = vllm(started=STARTED + 120)
            await look(run)
            assert await restarts(run, replica) == {"refused": 1, "start_time": 1, "zero_hits": 0}


async def test_a_slow_start_leaves_conversations_where_they_are() -> None:
    """One of two servers has just loaded its model, and has conversations. Their next turns are much longer than the first
    ones: as new work they would cost more there than the whole at the other server.
    """
    async with FakeReplica() as one, FakeReplica(listing=status(503, "Loading model")) as two, running(one, two) as run:
        two.listing = models("m", owner="llamacpp")
        await look(run)
        assert set(run.gateway.router.ledger.starting) == {two.name}
        talks = [[{"role": "user", "content": f"{number}: " + "All of it again, word by word. " * 100}] for number in range(5)]
        two.script = (answers(prompt=800),)
        await run.post({"name": one.name}, path="/warmroute/drain")
        for talk in talks:
            assert (await run.post({**LONG, "messages": talk}))[0] == 200
        await run.post({"name": one.name}, path="/warmroute/undrain")
        one.script = two.script = (answers(prompt=3000),)
        for talk in talks:
            talk += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "And all of this. " * 500}]
            _, headers, _ = await run.post({**LONG, "messages": talk})
            assert headers["x-warmroute-replica"] == two.name
        _, headers, _ = await run.post(LONG)
        assert headers["x-warmroute-replica"] == one.name, "new work"


async def test_a_replica_that_never_answered_has_lost_nothing() -> None:
    replica = FakeReplica()
    async with replica:
        pass
    async with running(replica) as run:
        assert await restarts(run, replica) == {"refused": 0, "start_time": 0, "zero_hits": 0}


async def test_zero_hits_on_warm_prefixes_are_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """The router's judgement (`Booking.close`) is logged and counted, and counts once with the start time that explains it."""
    text = "All of it again, word by word. "
    async with engine(metrics=vllm(started=STARTED)) as replica, running(replica) as run:
        prompts = [{**LONG, "messages": [{"role": "user", "content": f"{number}: {text * 300}"}]} for number in range(3)]
        replica.script = (answers(prompt=LONG_TOKENS, cached=LONG_TOKENS - 10),)
        for prompt in prompts * 2:
            await run.post(prompt)
        replica.script = (answers(prompt=LONG_TOKENS, cached=0),)
        replica.pages["/metrics"] = vllm(started=STARTED + 60)
        for prompt in prompts:
            assert (await restarts(run, replica))["zero_hits"] == 0
            await run.post(prompt)
        (line,) = lines(caplog, "replica restarted?")
        assert (line["levelname"], line["replica"], line["reason"]) == ("WARNING", replica.name, "zero_hits")
        await look(run)
        assert await restarts(run, replica) == {"refused": 0, "start_time": 0, "zero_hits": 1}


# -- overlap


async def overlap_zero(run: Running, replica: FakeReplica) -> float:
    return (await run.metrics())[f'warmroute_replica_cache_hits_missing{{replica="{replica.name}"}}']


async def test_an_overlap_of_zero_is_logged_once_until_the_first_hit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    replica = engine(metrics=vllm())
    replica.script = (answers(prompt=LONG_TOKENS, cached=0),)
    async with replica, running(replica) as run:
        for _ in range(ENOUGH_REQUESTS):
            await run.post(LONG)
        assert (await overlap_zero(run, replica), lines(caplog, "cached tokens stay at zero")) == (0, [])
        for _ in range(2 * ENOUGH_REQUESTS):
            await run.post(LONG)
        (line,) = lines(caplog, "cached tokens stay at zero")
        assert (line["levelname"], line["replica"], line["engine"]) == ("WARNING", replica.name, "vllm")
        assert "--enable-prefix-caching" in line["hint"]
        assert await overlap_zero(run, replica) == 1
        replica.script = (answers(prompt=LONG_TOKENS, cached=64),)
        await run.post(LONG)
        assert await overlap_zero(run, replica) == 0
        assert [line["levelname"] for line in lines(caplog, "cached tokens are no longer zero")] == ["INFO"]


async def test_an_engine_that_reports_caching_as_off_gets_a_hint_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = engine(metrics=page('vllm:cache_config_info{engine="0",enable_prefix_caching="False"} 1.0\n'))
    replica.script = (answers(prompt=LONG_TOKENS, cached=0),)
    async with replica, running(replica) as run:
        for _ in range(3 * ENOUGH_REQUESTS):
            await run.post(LONG)
    assert [line["hint"].startswith("Its metrics say that") for line in lines(caplog, "cached tokens stay at zero")] == [True]


@pytest.mark.parametrize(
    ("owner", "hint"), [("vllm", "--enable-prompt-tokens-details"), ("sglang", "--enable-cache-report"), ("x", "flag")]
)
async def test_an_engine_that_reports_nothing_gets_another_hint(
    caplog: pytest.LogCaptureFixture, owner: str, hint: str
) -> None:
    caplog.set_level(logging.INFO, "warmroute.replicas")
    replica = engine(owner)
    replica.script = (answers(prompt=LONG_TOKENS),)
    async with replica, running(replica) as run:
        for _ in range(2 * ENOUGH_REQUESTS):
            await run.post(LONG)
        (line,) = lines(caplog, "cached tokens are not reported")
        assert (line["levelname"], line["replica"]) == ("INFO", replica.name)
        assert hint in line["hint"]
        assert not lines(caplog, "cached tokens stay at zero")
        assert await overlap_zero(run, replica) == 0


async def test_a_restart_begins_the_row_of_zeros_anew(caplog: pytest.LogCaptureFixture) -> None:
    replica = engine(metrics=vllm(started=STARTED))
    replica.script = (answers(prompt=LONG_TOKENS, cached=0),)
    async with replica, running(replica) as run:
        (state,) = run.gateway.fleet.replicas
        for _ in range(3):
            await run.post(LONG)
        run.gateway.fleet.zero_hits(replica.name)
        assert state.overlap.requests > 0, "which a cache that never works looks like too"
        await look(run)  # remembers the start time again
        replica.pages["/metrics"] = vllm(started=STARTED + 60)
        await look(run)
        assert state.overlap.requests == 0


# -- predicted and available


async def test_what_the_best_holder_had_is_available_wherever_the_request_went() -> None:
    script = [answers(prompt=BODY_TOKENS)]
    async with (
        FakeReplica(script) as one,
        FakeReplica(script) as two,
        running(one, two, routing={"policy": "round_robin"}) as run,
    ):
        codes = [(await run.post())[0] for _ in range(2)]
        assert (codes, len(one.requests), len(two.requests)) == ([200, 200], 1, 1)
        metrics = await run.metrics()
        assert sum(value for name, value in metrics.items() if name.startswith("warmroute_predicted_cached_tokens_total")) == 0
        assert metrics['warmroute_available_cached_tokens_total{model="m"}'] > 100


@pytest.mark.parametrize(("count", "more"), [(20, {}), (500, {"more_models": 480})])
async def test_the_log_names_a_few_of_a_replicas_models(
    count: int, more: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with FakeReplica() as one:
        one.listing = models(*(f"m{number:03}" + "x" * 200 for number in range(count)))
        async with running(one):
            (line,) = lines(caplog, "replica up")
        assert line["models"] == [f"m{number:03}" + "x" * 56 + "..." + "x" * 37 for number in range(20)]
        assert {key: value for key, value in line.items() if key == "more_models"} == more
