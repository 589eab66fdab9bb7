"""Random headers: forwarding to the replica, detection of operators, and memory of the gateway.

An input is a request's line and headers, without the framing, which is added. The fuzzer checks the rules of docs/api.md
(request and response headers) and docs/security.md with a second, simple implementation: every head is answered; a head of
plain HTTP within the bounds is served; the replica gets the headers that are not about one connection, byte for byte and in
their order, and ours; only a directly connected client gets the name of the replica; and the gateway's memory does not grow
beyond a bound, nor do the labels of its metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from scripts.fuzzing import stage
from scripts.fuzzing.answers import CONTROL, TOKEN, Outcome
from scripts.fuzzing.mutate import mutate
from scripts.fuzzing.stage import Errors, error_code
from scripts.fuzzing.strict_replica import Received, StrictReplica
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.request.test_bounded import size_of

CLIENTS = 12
MAX_TENANTS: Final = 101
MAX_KEPT: Final = 60_000, 40_000_000  # entries of all containers and bytes, beyond what there was at the beginning
_BODY: Final = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"prompt":"hi"}'

# A second implementation of the rules.
_MAX_FIELDS: Final = 120  # of a client, that must be accepted; _TOO_MANY_FIELDS must be refused
_TOO_MANY_FIELDS: Final = 130
_MAX_BYTES: Final = 60_000
_TOO_MANY_BYTES: Final = 66_000
_LINE_BYTES: Final = 8_000
_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" te trailer transfer-encoding upgrade".split()
)
_OURS: Final = frozenset(
    b"host content-length content-encoding accept-encoding expect x-request-id"
    b" x-warmroute-admin-key x-warmroute-via x-number".split()
)
_MADE: Final = _OURS - {b"expect", b"x-warmroute-admin-key"}  # anew, and compared one by one; the others are dropped
_SAFE_ID: Final = re.compile(rb"[A-Za-z0-9_.:/+=-]{1,128}")
_OWN_ID: Final = re.compile(rb"wr-[0-9a-f]{32}")
_LOOPBACK: Final = re.compile(rb"(localhost|127[.0-9]*|2130706433|\[::1\])(:\d{1,5})?", re.IGNORECASE)  # and short forms
# The headers that every proxy adds. Programs behind a proxy may read "_" as "-".
_PROXIES: Final = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
_HARMLESS: Final = frozenset(b"x-a x-tenant-id x-session-id x-priority authorization content-type accept user-agent".split())

_NAMES: Final = [
    *(b"X-A", b"x-a", b"X_A", b"Accept", b"User-Agent", b"Authorization", b"Cookie", b"Content-Type", b"Origin", b"Range"),
    *(b"X-Tenant-Id", b"x-tenant-id", b"X_Tenant_Id", b"X-Session-Id", b"X-Correlation-Id", b"X-Priority"),
    *(b"X-Request-Id", b"x-REQUEST-id", b"X_Request_Id", b"X-Warmroute-Admin-Key", b"X-Warmroute-Replica"),
    *(b"X-Warmroute-Cached-Tokens", b"X-Warmroute-Anything", b"x-warmroute-", b"Host", b"host", b"Expect"),
    *(b"Forwarded", b"Via", b"X-Forwarded-For", b"X_Forwarded_For", b"X-Forwarded-Host", b"X-Forwarded-Proto", b"X-Real-IP"),
    *(b"Connection", b"Keep-Alive", b"Proxy-Connection", b"TE", b"Trailer", b"Upgrade", b"Proxy-Authorization"),
    *(b"Accept-Encoding", b"Content-Encoding", b"Content-Language", b"Sec-Fetch-Site", b"HTTP2-Settings", b"Date", b"Server"),
    *(b"!#$%&'*+-.^_`|~", b"0", b"Content_Length", b"Transfer_Encoding", b"Content-Lengthy"),
]
_VALUES: Final = [
    *(
        b"",
        b" ",
        b"a",
        b"a b",
        b"a\tb",
        b"  a  ",
        b"\xe9",
        "é😀".encode(),
        b"\x7f",
        b"\x01",
        b'"a',
        b"a,b",
        b"a;b=c",
        b"%00%0d%0a",
    ),
    *(
        b"127.0.0.1",
        b"for=127.0.0.1;host=localhost",
        b"for=[::1]",
        b"10.0.0.1, 127.0.0.1",
        b"unknown",
        b"localhost",
        b"[::1]:80",
    ),
    *(b"evil.example", b"127.0.0.1.evil.example", b"127.0.0.1:99999999", b"localhost@evil", b"2130706433"),
    *(b"close", b"keep-alive", b"Keep-Alive, X-A", b"X-Tenant-Id, authorization", b"X-Forwarded-For", b"Host, X-Request-Id"),
    *(b"x-number", b"Content-Length", b"upgrade", b"Accept-Encoding, ,,close", b"X-A\t, x_a", b"TE, trailers"),
    *(b"gzip", b"identity", b"br", b"gzip, br;q=0, *", b"identity;q=0", b"IDENTITY", b"identity, identity", b"zstd"),
    *(b"100-continue", b"200-ok", b"h2c", b"websocket", b"trailers", b"Bearer k", b"Basic Og==", b"same-origin", b"cross-site"),
    *(b"0", b"-1", b"99999999999999999999999", b"1e9", b"text/plain; charset=utf-16", b"application/json"),
    *(b"i" * 128, b"i" * 129, b"v" * 3000, b"v" * 20_000, b"v" * 70_000, b"a/b+c=d:e.f-g_h", b"wr-0", b"id with spaces"),
]
_LINES: Final = [
    b"POST /v1/chat/completions HTTP/1.1",
    b"POST /v1/completions HTTP/1.1",
    b"POST /v1/embeddings HTTP/1.1",
    b"PUT /v1/files/a HTTP/1.1",
    b"POST /v1/chat/completions?a=b HTTP/1.1",
]
TOKENS: Final = [*_NAMES, *_VALUES, b": ", b":", b"\r\n", b"\r\n", *(name + b": " for name in _NAMES)]


def invent(chance: Random) -> bytes:
    """A head of a few lines, or of very many."""
    lines = [chance.choice(_LINES[:1] * 3 + _LINES)]
    many = chance.random()
    count = chance.choice([0, 1, 1, 2, 3, 5]) if many < 0.93 else chance.choice([90, 100, 118, 140, 3000])
    if chance.random() < 0.9:
        lines.append(b"Host: " + chance.choice([b"localhost", b"127.0.0.1:80", b"h"]))
    for number in range(count):
        name, value = chance.choice(_NAMES), chance.choice(_VALUES)
        if count > 5:
            name, value = b"X-%d" % (number % chance.choice([1, 5000])), b"v" * chance.choice([0, 3, 400])
        elif chance.random() < 0.2:
            name, value = b"X-" + chance.randbytes(3).hex().encode(), chance.randbytes(chance.choice([4, 40])).hex().encode()
        lines.append(name + chance.choice([b": ", b": ", b":", b":  "]) + value)
    return b"\r\n".join(lines)


def make(known: bytes, chance: Random) -> bytes:
    """One input made of a known one, or of nothing; without framing."""
    made = mutate(known or invent(chance), chance, TOKENS) if chance.random() < 0.4 else invent(chance)
    first, *lines = made.split(b"\r\n")
    kept = [line for line in lines if not _is_framing(line)]
    return b"\r\n".join([first if first in _LINES else _LINES[0], *kept])


def _is_framing(line: bytes) -> bool:
    """Return whether a line is tested by scripts.fuzz requests instead: lengths, transfer codings, and invalid lines."""
    name = line.partition(b":")[0].strip().lower()
    return not line or name in (b"content-length", b"transfer-encoding", b"x-number") or bool({10, 13, 0} & set(line))


# -- the rules


@dataclass(frozen=True, slots=True)
class Head:
    """A parsed input. valid: it is plain HTTP."""

    path: str
    fields: tuple[tuple[bytes, bytes], ...]
    valid: bool

    @classmethod
    def of(cls, data: bytes) -> Head:
        line, *lines = data.split(b"\r\n")
        fields, valid = [], True
        for item in lines:
            name, colon, value = item.partition(b":")
            valid &= bool(colon and name) and set(name) <= TOKEN and not CONTROL & set(value)
            fields.append((name, value.strip(b" \t")))
        return cls(line.split(b" ")[1].decode(), tuple(fields), valid)

    def values(self, name: bytes) -> list[bytes]:
        return [value for known, value in self.fields if known.lower() == name]

    @property
    def size(self) -> int:
        return sum(len(name) + len(value) + 4 for name, value in self.fields)

    @property
    def opaque(self) -> bool:
        """It goes to a path whose bodies need not be understood."""
        return "completions" not in self.path or "?" in self.path

    def must_be_served(self) -> bool:
        if not self.valid or len(self.fields) > _MAX_FIELDS or self.size > _MAX_BYTES:
            return False
        if any(len(name) > _LINE_BYTES or len(value) > 64_000 for name, value in self.fields):
            return False
        names = Counter(name.lower() for name, _ in self.fields)
        if any(count > 1 and not name.startswith(b"x-") for name, count in names.items()):
            return False  # some may not be doubled
        if len(self.values(b"host")) != 1 or not re.fullmatch(rb"[a-z0-9.]+(:\d{1,4})?", self.values(b"host")[0]):
            return False
        if self.values(b"origin") and not self._asked_first():
            return False
        codings = self.values(b"content-encoding")
        plain = all(coding.lower() in (b"", b"identity") for coding in codings) and len(codings) < 2
        return plain and not (self.values(b"expect") or self.values(b"upgrade") or self.values(b"connection"))

    def must_be_refused(self) -> bool:
        if len(self.fields) > _TOO_MANY_FIELDS or self.size > _TOO_MANY_BYTES:
            return True
        codings = [value.lower() for value in self.values(b"content-encoding")]
        return codings in ([b"gzip"], [b"br"], [b"zstd"]) and not (self.opaque and codings != [b"gzip"])

    def _asked_first(self) -> bool:
        """A browser sends such a POST only after a preflight."""
        kinds = self.values(b"content-type")
        return bool(kinds) and kinds[0].startswith(b"application/json")

    def upstream(self) -> list[tuple[bytes, bytes]]:
        """The headers that a replica must get."""
        named = {token.strip().lower() for value in self.values(b"connection") for token in value.split(b",")}
        named -= {b"close", b"keep-alive"}
        gone = _HOP_BY_HOP | _OURS | named
        return [(name, value) for name, value in self.fields if name.lower() not in gone]

    def surely_indirect(self) -> bool:
        """Return whether the request came through a proxy or from a foreign web page."""
        names = {name.lower().replace(b"_", b"-") for name, _ in self.fields}
        hosts = self.values(b"host")
        return not names.isdisjoint(_PROXIES) or len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0])

    def surely_direct(self) -> bool:
        names = Counter(name.lower() for name, _ in self.fields)
        hosts = self.values(b"host")
        return set(names) <= _HARMLESS | {b"host"} and max(names.values()) == 1 and hosts in ([b"localhost"], [b"127.0.0.1:80"])


# -- the gateway


@dataclass(slots=True)
class Watched:
    """A running gateway, its replica, its logged errors, and its memory at the beginning."""

    run: Running
    replica: StrictReplica
    errors: Errors
    kept: tuple[int, int]
    number: int = 0
    grown: tuple[int, int] = (0, 0)

    async def blame(self, inputs: list[bytes], chance: Random) -> list[str]:
        return await stage.blame(self._batch, inputs, chance)

    def notes(self) -> list[str]:
        entries, size = self.grown
        return [
            f"After {self.number:,} requests the gateway kept {entries:,} entries and {size / 1e6:.1f} MB more than before."
        ]

    async def _batch(self, inputs: list[bytes], _chance: Random) -> list[str]:
        begun, self.number = self.number, self.number + len(inputs)
        self.replica.forget()
        self.errors.seen.clear()
        sent = (_framed(data, begun + at) for at, data in enumerate(inputs))
        answers = await asyncio.gather(*(stage.ask(self.run.url, data) for data in sent))
        status, _, _ = await self.run.get("/health")
        assert status == 200
        await eventually(lambda: self.run.gateway.router.ledger.open_leases == 0)
        assert not self.errors.seen, (self.errors.seen, inputs)
        assert not self.replica.wrong, (self.replica.wrong, inputs)
        taken = {int(request.get(b"x-number")[0]): request for request in self.replica.taken if request.get(b"x-number")}
        kinds = []
        for at, (data, answer) in enumerate(zip(inputs, answers, strict=True)):
            kinds.append(self._kind(data, answer, taken.get(begun + at)))
        if self.number // 5000 > begun // 5000:
            await self.check_kept()
        return kinds

    def _kind(self, data: bytes, answer: Outcome, taken: Received | None) -> str:
        head, context = Head.of(data), (data[:3000], answer)
        if answer.status != 200:
            code = error_code(answer)
            assert 400 <= answer.status < 500, context
            assert not head.must_be_served(), context
            assert taken is None, context
            self._tells_nothing(answer, head)
            return f"{answer.status} {code}"
        assert not head.must_be_refused(), context
        hidden = b"x-number" in {token.strip().lower() for value in head.values(b"connection") for token in value.split(b",")}
        assert taken is not None or hidden, context
        ids = _values(answer, b"x-request-id")
        assert len(ids) == 1, context
        if taken:
            self._arrived(head, taken, ids[0], context)
        shown = {name for name, _ in answer.headers if name.startswith(b"x-warmroute-")}
        if head.surely_indirect():
            assert not shown & {b"x-warmroute-replica", b"x-warmroute-cached-tokens"}, context
        if head.surely_direct():
            assert b"x-warmroute-replica" in shown, context
        return f"200, {'operator' if shown else 'client'}, {min(len(head.fields), 6)} headers, of them {_dropped(head)} dropped"

    def _arrived(self, head: Head, taken: Received, given_id: bytes, context: object) -> None:
        """Assert that the replica got the expected request."""
        offered = head.values(b"x-request-id")
        if offered and _SAFE_ID.fullmatch(offered[0]):
            assert given_id == offered[0], context
        else:
            assert taken.get(b"x-request-id") == [given_id], context
        (sent_id,) = taken.get(b"x-request-id")
        assert _OWN_ID.fullmatch(sent_id), context
        assert sent_id not in offered, context
        assert taken.get(b"host") == [self.replica.url.removeprefix("http://").encode()], context
        assert taken.get(b"accept-encoding") == [b"identity"], context
        assert taken.get(b"x-warmroute-via") == [self.run.gateway.loops.id.encode()], context
        assert taken.get(b"content-length") == [b"%d" % len(_BODY)], context
        assert taken.body == _BODY, context
        coding = head.values(b"content-encoding")
        assert taken.get(b"content-encoding") in ([], coding), context
        got = [(name, value.strip(b" \t")) for name, value in taken.fields if name.lower() not in _MADE]
        assert got == head.upstream(), (got, head.upstream(), context)

    def _tells_nothing(self, answer: Outcome, head: Head) -> None:
        """An error to a client that is not an operator has no address in it."""
        if head.surely_indirect():
            assert self.replica.url.removeprefix("http://").encode() not in answer.body, answer

    async def check_kept(self) -> None:
        """Raises AssertionError if the gateway keeps too much, or its metrics have too many labels."""
        gc.collect()
        found = size_of(self.run)
        self.grown = found.entries - self.kept[0], found.size - self.kept[1]
        assert self.grown[0] < MAX_KEPT[0], (self.grown, found.by_type.most_common(10))
        assert self.grown[1] < MAX_KEPT[1], (self.grown, found.by_type.most_common(10))
        page = (await self.run.get("/metrics"))[2].decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        tenants = {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels}
        assert len(tenants) <= MAX_TENANTS, len(tenants)
        assert all(len(tenant) <= 64 and tenant.isprintable() for tenant in tenants), tenants


def _framed(data: bytes, number: int) -> bytes:
    return data + b"\r\nX-Number: %d\r\nContent-Length: %d\r\n\r\n" % (number, len(_BODY)) + _BODY


def _values(answer: Outcome, name: bytes) -> list[bytes]:
    return [value for known, value in answer.headers if known.lower() == name]


def _dropped(head: Head) -> int:
    return min(6, len(head.fields) - len(head.upstream()))


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    with stage.errors_logged() as errors:
        async with StrictReplica(keep=True) as replica:
            prices = {"*": {"input": 1.0, "output": 1.0}}  # so that tenants are metered
            async with running(replica.url, prices=prices, routing={"memory_mb": 1}) as run:
                await stage.ask(run.url, _framed(_LINES[0] + b"\r\nHost: h", 0))
                gc.collect()
                found = size_of(run)
                made = Watched(run, replica, errors, (found.entries, found.size))
                yield made
                await made.check_kept()
