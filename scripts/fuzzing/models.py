"""Random model names, listed by replicas and requested by clients, at a gateway with three pools.

    pool 0  PREFIXES      two replicas
    pool 1  no prefixes   two replicas
    pool 2  no prefixes   one replica

What must hold: a request reaches a replica only if that one lists the model, or if no replica of its pool does and the pool's
prefixes fit; what GET /v1/models lists is served; everything else is refused in the API's own shape, shortly; the metrics can
be read, and have no more than a bound of models' names; where replicas list thousands of models, an answer takes little CPU
time once the gateway has made its list of them.

An input is a recipe. lists: the names that each of the five replicas lists; asked: the models in requests (any JSON); path;
many: how many further names the last replica lists.
"""

from __future__ import annotations

import contextlib
import json
import time
import unicodedata
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from gateway.dialects.api_request import MAX_MODEL_CHARS
from gateway.fleet.directory import MAX_LABELS
from gateway.fleet.engine_client import MAX_MODELS
from scripts.fuzzing import stage
from scripts.fuzzing.answers import Outcome
from scripts.fuzzing.stage import Errors, Recipe, error_code, read_recipe
from scripts.fuzzing.strict_replica import StrictReplica
from tests.gateway.conftest import Running, running

CLIENTS = 1
POOLS: Final = ((0, 1), (2, 3), (4,))  # numbers of the replicas
PREFIXES: Final = ("llama-", "org/", "org/a/", "\xe9")
CHAT, COMPLETION, OTHER = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LONGEST_S: Final = 0.1
_CHECKED_EVERY: Final = 50  # inputs: reading the metrics of a thousand models takes a second
_FURTHER_NAMES: Final = 400  # that are requested, where a replica lists thousands
_FURTHER_LABELS: Final = {"other", "none", "unlisted", "unknown", *PREFIXES}

_STEMS: Final = [
    *("m", "llama-3", "llama-", "llama", "Llama-3", "org/x", "org/a/x", "org", "org//x", "/", "../m", "m:latest", "m@v1", "*"),
    *(
        "e\u0301x",
        "\xe9x",
        "\xe9",
        "😀",
        "ﬁ",
        "\u202em",
        "m\u200b",
        "\x00",
        "m\n",
        "m\r\nX: y",
        'm"',
        "m\\",
        "m ",
        " m",
        "",
        "%6d",
    ),
    *(
        "none",
        "other",
        "unknown",
        "unlisted",
        "a" * MAX_MODEL_CHARS,
        "a" * (MAX_MODEL_CHARS + 1),
        "b" * 5000,
        "{m}",
        "m,n",
        "-1",
    ),
]
_ODD: Final = [None, 0, 1.5, True, [], ["m"], {}, {"id": "m"}]


def invent(chance: Random) -> dict[str, Any]:
    names = [_name(chance) for _ in range(chance.choice([1, 3, 8]))]
    lists: list[list[Any]] = [[chance.choice(names) for _ in range(chance.choice([0, 1, 1, 2, 4]))] for _ in range(5)]
    if chance.random() < 0.2:
        lists[chance.randrange(5)].append(chance.choice(_ODD))
    asked: list[Any] = [
        chance.choice(names) if chance.random() < 0.5 else _near(chance.choice(names), chance) for _ in range(6)
    ]
    if chance.random() < 0.3:
        asked.append(chance.choice(_ODD))
    return {
        "lists": lists,
        "asked": asked,
        "path": chance.choice([CHAT, CHAT, COMPLETION, OTHER]),
        "many": chance.choice([0] * 20 + [MAX_MODELS - 1, MAX_MODELS + 1]),
    }


def _name(chance: Random) -> str:
    stem = chance.choice(_STEMS)
    return stem if chance.random() < 0.6 else stem + chance.choice(["-7b", "/x", chance.randbytes(4).hex(), "x" * 250])


def _near(name: str, chance: Random) -> str:
    """A name that reads much like it."""
    forms = [name.upper(), name + "x", name[:-1], "/" + name, name + "/", " " + name, name.replace("/", "%2f"), name * 2]
    return chance.choice([*forms, unicodedata.normalize("NFC", name), unicodedata.normalize("NFKD", name), name + "\u200d"])


def make(known: bytes, chance: Random) -> bytes:
    return stage.vary(known, invent, chance)


# -- a second implementation of the rules


def _listed(names: Sequence[object], many: int) -> list[str]:
    """The valid names of a replica's list."""
    known = [name for name in names if isinstance(name, str) and len(name) <= MAX_MODEL_CHARS]
    return list(dict.fromkeys(known + _many(many)))[:MAX_MODELS]


def _many(count: int) -> list[str]:
    return [f"adapter-{number:05d}" for number in range(count)]


def _servers(lists: Sequence[Sequence[str]], model: str) -> set[int]:
    """The replicas that may serve the model: the pool whose prefix fits, else the first pool that lists it."""
    if model.startswith(PREFIXES):
        pool: Sequence[int] = POOLS[0]
    else:
        pool = next((pool for pool in POOLS[1:] if any(model in lists[number] for number in pool)), ())
    return {number for number in pool if model in lists[number]} or set(pool)


def _request(recipe: Recipe, model: object) -> bytes:
    sent = {"model": model, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    body = json.dumps(sent).encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (recipe["path"].encode(), len(body)) + body


# -- the gateway


@dataclass(slots=True)
class Watched:
    """A running gateway, its replicas, and its logged errors."""

    run: Running
    replicas: Sequence[StrictReplica]
    errors: Errors
    labels: set[str] = field(default_factory=set)
    longest_s: float = 0.0
    _tried: int = 0

    async def blame(self, inputs: list[bytes], chance: Random) -> list[str]:
        return [await self._one(read_recipe(data), chance) for data in inputs]

    def notes(self) -> list[str]:
        return [
            f"Metrics had {len(self.labels)} names of models. Where a replica lists {MAX_MODELS:,} models, an answer took "
            f"{self.longest_s * 1e3:.0f} ms of CPU time at most. Each is requested three times, and the shortest time counts."
        ]

    async def _one(self, recipe: Recipe, chance: Random) -> str:
        self.errors.seen.clear()
        lists = [_listed(names, recipe["many"] if at == 4 else 0) for at, names in enumerate(recipe["lists"])]
        for at, (replica, names) in enumerate(zip(self.replicas, recipe["lists"], strict=True)):
            replica.forget()
            replica.names = [*names, *_many(recipe["many"])] if at == 4 else names
        await self.run.gateway.fleet.probe_all(self.run.gateway.upstream)
        shown = await self._shown(recipe, lists, chance)
        kinds = set()
        for model in [*recipe["asked"], *shown[:3]]:
            kinds.add(await self._asked(recipe, lists, model, must=model in shown))
        assert not self.errors.seen, (self.errors.seen, recipe)
        assert not any(replica.wrong for replica in self.replicas), recipe
        self._tried += 1
        if self._tried % _CHECKED_EVERY == 0:
            await self.check_labels()
        return ", ".join(sorted(kinds))

    async def _shown(self, recipe: Recipe, lists: Sequence[Sequence[str]], chance: Random) -> list[str]:
        """GET /v1/models."""
        answer = await self._timed(recipe, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if recipe["many"]:
            await self._timed(recipe, _request(recipe, "nobody's"))
            for name in chance.sample(_many(MAX_MODELS - 1), _FURTHER_NAMES):
                await stage.ask(self.run.url, _request(recipe, name))
        assert answer.status == 200, (recipe, answer)
        shown = [entry["id"] for entry in json.loads(answer.body)["data"]]
        assert len(set(shown)) == len(shown), (recipe, shown)
        assert set(shown) <= {name for names in lists for name in names}, (recipe, shown)
        return shown

    async def _asked(self, recipe: Recipe, lists: Sequence[Sequence[str]], model: object, *, must: bool) -> str:
        for replica in self.replicas:
            replica.forget()
        sent = _request(recipe, model)
        answer = await stage.ask(self.run.url, sent)
        reached = {at for at, replica in enumerate(self.replicas) if replica.taken}
        context = dict(recipe), model, answer.status, answer.body[:300], reached
        name = model if isinstance(model, str) and 0 < len(model) <= MAX_MODEL_CHARS else ""
        wanted = _servers(lists, name) if name else set()
        if answer.status == 200:
            assert reached, context
            assert reached <= wanted, (context, wanted)
            (taken,) = [taken for replica in self.replicas for taken in replica.taken]
            assert sent.endswith(b"\r\n\r\n" + taken.body), context
            return "200"
        assert not reached, context
        assert not wanted, (context, wanted)
        assert not must or not name, context
        assert answer.status in ((404,) if name else (400,)), context
        return f"{answer.status} {error_code(answer)}"

    async def _timed(self, recipe: Recipe, data: bytes) -> Outcome:
        """An answer, whose time is of interest where there are many models. The shortest of three counts, for the longest may
        be that of a garbage collection.
        """
        times = []
        for _ in range(3 if recipe["many"] else 1):
            begun = time.thread_time()
            answer = await stage.ask(self.run.url, data)
            times.append(time.thread_time() - begun)
        if recipe["many"]:
            self.longest_s = max(self.longest_s, min(times))
        assert min(times) < LONGEST_S, (times, recipe, data[:300])
        return answer

    async def check_labels(self) -> None:
        """Raises AssertionError if the metrics cannot be read, or have too many models."""
        page = (await self.run.get("/metrics"))[2].decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        self.labels = {sample.labels["model"] for sample in samples if "model" in sample.labels}
        assert len(self.labels - _FURTHER_LABELS) <= MAX_LABELS, len(self.labels)
        assert all(len(label) <= MAX_MODEL_CHARS for label in self.labels), self.labels


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    with stage.errors_logged() as errors:
        async with contextlib.AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(StrictReplica(keep=True)) for _ in range(5)]
            pools: list[dict[str, Any]] = [{"replicas": [replicas[at].url for at in pool]} for pool in POOLS]
            pools[0]["models"] = list(PREFIXES)
            run = await stack.enter_async_context(running(pools=pools, prices={"*": {"input": 1.0, "output": 1.0}}))
            made = Watched(run, replicas, errors)
            yield made
            await made.check_labels()
