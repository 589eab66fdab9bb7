"""Random cache salts of several tenants, to a gateway with isolation of tenants, and to one without.

The fuzzer checks with isolation: a prompt of one tenant is never expected to be cached for another, for any salt that the
other sends, also the first one's salt at the engine; no two tenants have the same salt there, nor have two salts of one tenant;
the same tenant with the same salt has its prompt cached. Without isolation: the body is forwarded unchanged, the same salts
share a prompt between all senders, and different salts do not. All of this holds for small bodies, large ones (another process
parses them) and compressed ones.

An input is a recipe. a, b: tenants, null: no header; salt, other: what stands for `cache_salt` in the body (JSON, or nearly),
null: nothing does; name: how the member is written; first: it stands at the body's beginning; path; pad: bytes of an image that
make the body large; coding; encoding: of the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

from gateway.parser.parsing import INLINE_BYTES
from scripts.fuzzing import stage
from scripts.fuzzing.answers import Outcome
from scripts.fuzzing.stage import Errors, Recipe, error_code, read_recipe
from scripts.fuzzing.strict_replica import StrictReplica
from tests.gateway.conftest import Running, eventually, running

CLIENTS = 4
CHAT, COMPLETION, OTHER = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_BLOCKS: Final = 3 * 256  # bytes of a prompt, three blocks

_TENANTS: Final = [
    *(None, "", "a", "b", "A", "a ", " a", "ab", "a,b", "a b", "none", "null", "0", "\xe9", "e\u0301", "\u00e9", "😀", "-"),
    *("a" * 63, "a" * 64, "a" * 65, "a" * 64 + "b", "a" * 300, "tenant", "?", '"', "\\", "a\tb", "digest:"),
]
_SALTS: Final = [
    *(None, '""', '"a"', '"b"', '"ab"', '"A"', '"\\u0061"', '"\\u0000"', '"\\u001c"', '"a\\u001cb"', '"\\u00e9"', '"e\\u0301"'),
    *(
        '"😀"',
        '"\\ud83d\\ude00"',
        '"\\ud800"',
        '"digest:"',
        '"none"',
        '"null"',
        '"a","cache_salt":"b"',
        '"b","cache_salt":null',
    ),
    *("null", "true", "false", "0", "1", "-0.0", "1e999", "9" * 400, "[]", "{}", '["a"]', '{"cache_salt":"a"}', "NaN", '"', ""),
    *(f'"{"s" * length}"' for length in (16, 31, 63, 64, 65, 71, 1024, 5000, 100_000)),
    *(f'"{"s" * 64}{end}"' for end in "ab"),
    '"digest:' + "0" * 32 + '"',
]
_NAMES: Final = ['"cache_salt"', '"cache_sal\\u0074"', ' "cache_salt" ', '"Cache_Salt"', '"cache_salt "']
_ENCODINGS: Final = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1"]


def invent(chance: Random) -> dict[str, Any]:
    def salt() -> str | None:
        return chance.choice(_SALTS) if chance.random() < 0.8 else json.dumps(chance.randbytes(chance.choice([1, 8, 40])).hex())

    return {
        "a": chance.choice(_TENANTS),
        "b": chance.choice(_TENANTS),
        "salt": salt(),
        "other": salt(),
        "name": chance.choice(_NAMES[:1] * 4 + _NAMES),
        "first": chance.random() < 0.5,
        "path": chance.choice([CHAT, COMPLETION, OTHER]),
        "pad": chance.choice([0, 0, 0, 0, INLINE_BYTES]),
        "coding": chance.choice(["", "", "", "gzip"]),
        "encoding": chance.choice(_ENCODINGS[:1] * 12 + _ENCODINGS),
    }


def make(known: bytes, chance: Random) -> bytes:
    return stage.vary(known, invent, chance)


# -- requests and outcomes


class Seen(NamedTuple):
    """The outcome of one request. salt: at the replica, as JSON; cached: predicted cached tokens."""

    status: int
    code: str
    body: bytes
    salt: object
    cached: int

    def __repr__(self) -> str:
        return (
            f"<{self.status} {self.code}, {self.body[:60]!r}...{self.body[-120:]!r}, salt {self.salt!r}, cached {self.cached}>"
        )


_NO_SALT: Final = object()
_NO_JSON: Final = object()


def _text(recipe: Recipe, salt: str | None, prompt: str) -> str:
    """A body with that salt."""
    member = "" if salt is None else f"{recipe['name']}:{salt}"
    if recipe["path"] == CHAT:
        rest = f'"messages":[{{"role":"user","content":"{prompt}"}}]'
    else:
        rest = f'"{"prompt" if recipe["path"] == COMPLETION else "input"}":"{prompt}"'
    if recipe["pad"]:
        rest += f',"x":"{"x" * recipe["pad"]}"'
    members = [member, '"model":"m"', rest] if recipe["first"] else ['"model":"m"', rest, member]
    return "{" + ",".join(filter(None, members)) + "}"


def _request(recipe: Recipe, tenant: str | None, body: bytes, number: int) -> bytes:
    head = [b"POST " + recipe["path"].encode() + b" HTTP/1.1", b"Host: localhost", b"X-Number: %d" % number]
    if tenant is not None:
        head.append(b"X-Tenant-Id: " + tenant.encode())
    if recipe["coding"]:
        body = gzip.compress(body)
        head.append(b"Content-Encoding: gzip")
    return b"\r\n".join((*head, b"Content-Length: %d" % len(body), b"", body))


def _tenant(name: str | None) -> str:
    """The tenant's key: a header's value is stripped; None without one."""
    return (name or "").strip(" \t")


def _own(recipe: Recipe, salt: str | None) -> object:
    """The client's salt as an engine reads it; _NO_SALT: it has none."""
    try:
        body = json.loads(_text(recipe, salt, ""))
    except ValueError:
        return _NO_SALT
    found = body.get("cache_salt", _NO_SALT)
    return found if isinstance(found, str) and found else _NO_SALT


def _is_plain(recipe: Recipe) -> bool:
    """Return whether the recipe's body is JSON to every parser."""
    own, salt = _own(recipe, recipe["salt"]), recipe["salt"]
    strict = salt is None or (isinstance(own, str) and "\ud800" not in own and "NaN" not in salt)
    return strict and recipe["encoding"] in ("utf-8", "latin-1")


# -- the gateways


@dataclass(slots=True)
class Watched:
    """Two gateways, one of which isolates tenants, and their replicas. owners: by salt at the isolated one."""

    open: Running
    isolated: Running
    open_replica: StrictReplica
    isolated_replica: StrictReplica
    errors: Errors
    owners: dict[str, tuple[str, object]] = field(default_factory=dict)
    number: int = 0

    async def blame(self, inputs: list[bytes], chance: Random) -> list[str]:
        return await stage.blame(self._batch, inputs, chance)

    def notes(self) -> list[str]:
        return [f"{len(self.owners):,} salts reached the replica, each of one tenant and one salt of its own."]

    async def _batch(self, inputs: list[bytes], chance: Random) -> list[str]:
        self.errors.seen.clear()
        for replica in (self.open_replica, self.isolated_replica):
            replica.forget()
        kinds = await asyncio.gather(*(self._one(read_recipe(data), chance) for data in inputs))
        assert not self.errors.seen, (self.errors.seen, inputs)
        return kinds

    async def _one(self, recipe: Recipe, chance: Random) -> str:
        prompt = chance.randbytes(_BLOCKS // 2).hex()
        alone = await self._isolated(recipe, prompt)
        shared = await self._open(recipe, prompt)
        return f"{recipe['path']} {recipe['encoding']}: isolated {alone}, open {shared}"

    async def _isolated(self, recipe: Recipe, prompt: str) -> str:
        a, b, salt, other = recipe["a"], recipe["b"], recipe["salt"], recipe["other"]
        first = await self._ask(recipe, a, salt, prompt, isolated=True)
        again = await self._ask(recipe, a, salt, prompt, isolated=True)
        foreign = await self._ask(recipe, b, salt, prompt, isolated=True)
        context = dict(recipe), first, again, foreign
        assert first.status == again.status == foreign.status, context
        if first.status != 200:
            return f"{first.status} {first.code}"
        assert first.cached == 0, context
        if first.salt is _NO_JSON:
            return "200, no JSON"
        self._owned(a, _own(recipe, salt), first, context)
        self._owned(b, _own(recipe, salt), foreign, context)
        if _tenant(a) == _tenant(b):
            assert foreign.salt == first.salt, context
            return "200, one tenant"
        assert foreign.cached == 0, context
        # The other tenant sends the first one's salt at the engine.
        stolen = await self._ask(recipe, b, json.dumps(first.salt), prompt, isolated=True)
        assert stolen.salt != first.salt, (context, stolen)
        if _own(recipe, json.dumps(first.salt)) != _own(recipe, salt):
            assert stolen.cached == 0, (context, stolen)
        elsewhere = await self._ask(recipe, a, other, prompt, isolated=True)
        if elsewhere.status == 200 and elsewhere.salt is not _NO_JSON:
            self._owned(a, _own(recipe, other), elsewhere, (context, elsewhere))
        assert again.salt == first.salt, context
        if again.cached:
            return "200, cached"
        assert not _is_plain(recipe), context
        return "200, not read"

    def _owned(self, tenant: str | None, own: object, seen: Seen, context: object) -> None:
        """Assert that the replica got a salt of this tenant and client salt only."""
        assert isinstance(seen.salt, str), context
        assert len(seen.salt) == 32, context
        owner = _tenant(tenant), own
        assert self.owners.setdefault(seen.salt, owner) == owner, (self.owners[seen.salt], owner, context)

    async def _open(self, recipe: Recipe, prompt: str) -> str:
        salt, other = recipe["salt"], recipe["other"]
        first = await self._ask(recipe, recipe["a"], salt, prompt, isolated=False)
        again = await self._ask(recipe, recipe["b"], salt, prompt, isolated=False)
        foreign = await self._ask(recipe, recipe["a"], other, prompt, isolated=False)
        context = dict(recipe), first, again, foreign
        assert first.status == again.status, context
        if first.status == 200:
            assert first.body == _text(recipe, salt, prompt).encode(recipe["encoding"], "replace"), context
        if first.status == foreign.status == 200 and _own(recipe, salt) != _own(recipe, other):
            assert foreign.cached == 0, context
        return f"{first.status}{', cached' if again.cached else ''}"

    async def _ask(self, recipe: Recipe, tenant: str | None, salt: str | None, prompt: str, *, isolated: bool) -> Seen:
        run, replica = (self.isolated, self.isolated_replica) if isolated else (self.open, self.open_replica)
        self.number += 1
        number = self.number
        body = _text(recipe, salt, prompt).encode(recipe["encoding"], "replace")
        answer = await stage.ask(run.url, _request(recipe, tenant, body, number))
        if answer.status != 200:
            assert 400 <= answer.status < 500, (dict(recipe), answer)
            return Seen(answer.status, error_code(answer), b"", _NO_SALT, 0)
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        (taken,) = [taken for taken in replica.taken if taken.get(b"x-number") == [b"%d" % number]]
        return Seen(200, "", taken.body, _salt_of(taken.body), _cached(answer))


def _salt_of(body: bytes) -> object:
    """As engines parse it: by Python's `json`, UTF-16 included."""
    try:
        found = json.loads(body)
    except ValueError:
        return _NO_JSON
    return found.get("cache_salt", _NO_SALT)


def _cached(answer: Outcome) -> int:
    return next(int(value) for name, value in answer.headers if name.lower() == b"x-warmroute-cached-tokens")


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    with stage.errors_logged() as errors:
        async with (
            StrictReplica(keep=True) as one,
            StrictReplica(keep=True) as two,
            running(one.url) as open_,
            running(two.url, routing={"isolation": "tenant"}) as isolated,
        ):
            yield Watched(open_, isolated, one, two, errors)
