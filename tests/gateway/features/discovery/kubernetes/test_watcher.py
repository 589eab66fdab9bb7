"""The watcher against an API server that speaks real lists and watches, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from gateway.features.discovery.kubernetes import api as kubernetes_api
from gateway.features.discovery.kubernetes.api import Api, ApiAccess, KubernetesError, access_of
from gateway.features.discovery.kubernetes.objects import read_slice
from gateway.features.discovery.kubernetes.watcher import EMPTY_S, RELIST_RETRY_S, RELIST_S, Watcher
from gateway.features.discovery.section import KubernetesConfig
from tests.gateway.conftest import eventually
from tests.gateway.upstream.certificates import Authority
from tests.support.kubernetes import SLICES, FakeKubernetes, endpoint, slice_of

PATH = "apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
LABELS = "kubernetes.io/service-name=vllm"


class Seen:
    """What a watcher reports. addresses: of all endpoints, at each change. problems: without repetitions."""

    def __init__(self) -> None:
        self.addresses: list[Sequence[str]] = []
        self.problems: list[str] = []

    @property
    def last(self) -> Sequence[str]:
        return self.addresses[-1] if self.addresses else ()

    @property
    def problem(self) -> str:
        return self.problems[-1] if self.problems else ""

    def report(self, problem: str) -> None:
        if problem != self.problem:
            self.problems.append(problem)


class Time:
    """A clock that pauses set forward, and what they were. The first `hold` seconds are as long as they seem."""

    def __init__(self, most: int = 10_000) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._most = most

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        if len(self.pauses) >= self._most:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)


def half() -> float:
    """No chance: pauses are three quarters of the longest."""
    return 0.5


@contextlib.asynccontextmanager
async def watching(
    server: FakeKubernetes,
    tmp_path: Path,
    watch_s: float = 100,
    *,
    time: Time | None = None,
    sleep: Callable[[float], Awaitable[None]] | None = None,
    seen: Seen | None = None,
    access: ApiAccess | None = None,
    expects: bool = False,
) -> AsyncIterator[Seen]:
    seen, time = seen or Seen(), time or Time()
    access = access or ApiAccess(server.url, "default", token_file=tmp_path / "token")
    (tmp_path / "token").touch()
    api = Api(access, PATH, LABELS, watch_s, lambda: 0.0)
    watcher = Watcher(
        "test", api, lambda each: read_slice(each, None), seen.report, clock=time, sleep=sleep or time.sleep, chance=half
    )

    async def watch() -> None:
        async for objects in watcher.watch(expects=expects):
            seen.addresses.append(sorted(each.address for read in objects for each in read.endpoints))

    task = asyncio.create_task(watch())
    try:
        yield seen
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


async def put(server: FakeKubernetes, *names: str, last: int = 1) -> None:
    """A slice of each name (a letter and a number, or a letter), whose endpoint has an address of that name."""
    for name in names:
        await server.put(SLICES, slice_of(name, endpoint(address_of(name, last))))


def address_of(name: str, last: int = 1) -> str:
    return f"10.{ord(name[0])}.{name[1:] or 0}.{last}"


def addresses(*names: str) -> list[str]:
    return sorted(map(address_of, names))


async def test_it_lists_once_and_follows_what_changes(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a", "b")
    await server.put(SLICES, slice_of("other", endpoint("10.0.0.9"), service="other"))
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: seen.last == addresses("a", "b"))
        await put(server, "c")
        await eventually(lambda: seen.last == addresses("a", "b", "c"))
        await server.delete(SLICES, "a")
        await eventually(lambda: seen.last == addresses("b", "c"))
        await put(server, "b", last=7)
        await eventually(lambda: seen.last == sorted([address_of("b", 7), address_of("c")]))
        changes = len(seen.addresses)
        await put(server, "b", last=7)  # another version of the same
        await server.put(SLICES, slice_of("other", endpoint("10.0.0.8"), service="other"))
        await put(server, "d")
        await eventually(lambda: address_of("d") in seen.last)
        assert len(seen.addresses) == changes + 1
        assert (server.lists, server.watches, seen.problem) == (1, 1, "")


async def test_a_list_comes_in_pages(tmp_path: Path) -> None:
    server = FakeKubernetes()
    names = [f"a{number}" for number in range(250)]
    await put(server, *names)
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: seen.last == addresses(*names))
        assert server.lists == 3


async def test_each_page_is_read_before_the_next_one_comes(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, *[f"a{number}" for number in range(250)])
    async with server.serving():
        api = Api(ApiAccess(server.url, "default"), PATH, LABELS, 100, lambda: 0.0)
        listed = await api.list_all(lambda _object: server.lists)
        assert sorted(listed.objects.values()) == [1] * 100 + [2] * 100 + [3] * 50
        await api.close()


async def test_a_token_that_is_no_token_is_not_read_whole(tmp_path: Path) -> None:
    server, token = FakeKubernetes(), tmp_path / "large"
    token.write_text("x" * (kubernetes_api.MAX_TOKEN_BYTES + 1))
    async with server.serving(), watching(server, tmp_path, access=ApiAccess(server.url, "default", token_file=token)) as seen:
        await eventually(lambda: "is larger than 64 KiB" in seen.problem)
        assert not server.asked


async def test_a_watch_that_is_cut_or_ends_goes_on_without_a_list(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, watch_s=1, time=time) as seen:
        await eventually(lambda: server.watches == 1 and seen.last == addresses("a"))
        server.cut_streams()
        await put(server, "b")
        await eventually(lambda: seen.last == addresses("a", "b"))
        await eventually(lambda: server.watches >= 3)  # one of them has ended in time
        await put(server, "c")
        await eventually(lambda: seen.last == addresses("a", "b", "c"))
        assert server.lists == 1


async def test_a_server_that_ends_each_watch_at_once_is_asked_rarely(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time(most=8)
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, watch_s=0, time=time) as seen:
        await eventually(lambda: len(time.pauses) == 8)
        assert "the server ends each watch at once" in seen.problems
    assert time.pauses == [pytest.approx(min(2.5, 0.1 * 2**n) * 0.75) for n in range(8)]


async def test_bookmarks_carry_the_version_on(tmp_path: Path) -> None:
    """Events of other objects, which this watch does not get, push its version out of the window."""
    server = FakeKubernetes(window=3)
    server.bookmark_s = 0.01
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: seen.last == addresses("a"))
        for number in range(5):
            await server.put(SLICES, slice_of(f"other-{number}", endpoint("10.0.0.9"), service="other"))
            await eventually(lambda: server.bookmarks[-3:] == [server.version] * 3)  # so that the first one has been read
        version = str(server.version)
        asked = len(server.asked)
        server.cut_streams()
        await eventually(lambda: len(server.asked) > asked)
        await put(server, "b")
        await eventually(lambda: seen.last == addresses("a", "b"))
        assert (server.lists, server.expired) == (1, 0)
        assert server.asked[-1].query["resourceVersion"] == version


async def test_a_version_that_is_too_old_leads_to_a_list_which_replaces_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = FakeKubernetes(window=3)
    await put(server, "a", "b")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.watches == 1)
        await server.delete(SLICES, "a")
        await eventually(lambda: seen.last == addresses("b"))
        server.hold_watches.clear()
        server.cut_streams()
        await eventually(lambda: server.held)
        await server.delete(SLICES, "b")
        await put(server, *[f"c{number}" for number in range(9)])
        assert seen.last == addresses("b"), "what was known stays"
        server.hold_watches.set()
        await eventually(lambda: seen.last == addresses(*[f"c{number}" for number in range(9)]))
        assert (server.lists, server.expired) == (2, 1)
        await eventually(lambda: not seen.problem)
    messages = [(record.levelname, record.message) for record in caplog.records if record.name == "warmroute.discovery"]
    assert ("INFO", "objects are listed again") in messages


async def test_a_compaction_in_mid_watch_leads_to_a_list(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.watches == 1)
        server.version += 5  # events of others
        await server.compact()
        await put(server, "b")
        await eventually(lambda: seen.last == addresses("a", "b"))
        assert server.lists == 2


async def test_a_server_that_is_gone_changes_nothing_and_is_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute")
    server, time = FakeKubernetes(), Time()
    await put(server, "a", "b")
    async with server.serving():
        url = server.url

    def said(message: str) -> int:
        return [record.message for record in caplog.records].count(message)

    async with watching(server, tmp_path, time=time) as seen:
        await eventually(lambda: len(time.pauses) > 3)
        assert not seen.addresses
        async with server.serving():
            assert server.url == url
            await eventually(lambda: server.watches == 1 and not seen.problem)
            assert seen.last == addresses("a", "b")
            await put(server, "c")
            await eventually(lambda: seen.last == addresses("a", "b", "c"))  # so the watch has begun
            time.now += 2
            await put(server, "d")
            await eventually(lambda: seen.last == addresses("a", "b", "c", "d"))
            assert said("the API server answers again") == 1
        await eventually(lambda: seen.problem)
        assert seen.last == addresses("a", "b", "c", "d")
        await server.delete(SLICES, "b")
        async with server.serving():
            await eventually(lambda: seen.last == addresses("a", "c", "d"))
    assert said("the API server does not answer correctly") == 2, "each outage once"


async def test_after_several_failures_it_lists_again(tmp_path: Path) -> None:
    """The server may have been restored from a backup, and count versions from an earlier one."""
    server = FakeKubernetes()
    await put(server, "a", "b")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.watches == 1)
        server.refusals = [(504, {})] * 2  # beside the cut
        server.take(SLICES, "b")
        server.restore(7)
        server.cut_streams()
        await eventually(lambda: seen.last == addresses("a"))
        assert server.lists == 2


async def test_it_lists_again_from_time_to_time(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time()
    await put(server, "a", "b")
    async with server.serving(), watching(server, tmp_path, watch_s=1, time=time) as seen:
        await eventually(lambda: server.watches == 1)
        server.take(SLICES, "b")
        time.now += RELIST_S + 1
        await eventually(lambda: seen.last == addresses("a"))
        assert server.lists == 2


async def test_the_token_is_read_for_each_request(tmp_path: Path) -> None:
    server = FakeKubernetes()
    server.token = "first"
    (tmp_path / "token").write_text("first\n")
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: seen.last == addresses("a"))
        server.token = "second"
        server.cut_streams()
        await eventually(lambda: "401" in seen.problem)
        (tmp_path / "token").write_text("second\n")
        await put(server, "b")
        await eventually(lambda: seen.last == addresses("a", "b"))


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.write_text("a\nb"), lambda path: path.write_bytes(b"\xff")]
)
async def test_a_token_file_that_is_none_is_named(make: Callable[[Path], object], tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a")
    token = tmp_path / "odd"
    make(token)
    async with server.serving(), watching(server, tmp_path, access=ApiAccess(server.url, "default", token_file=token)) as seen:
        await eventually(lambda: seen.problem)
        if token.is_dir():
            token.rmdir()
        else:
            token.unlink()
        token.write_text("good")
        await eventually(lambda: seen.last == addresses("a"))


@pytest.mark.parametrize("code", [302, 403, 404, 429, 500, 503])
async def test_a_refusal_is_named_and_tried_again(code: int, tmp_path: Path) -> None:
    server = FakeKubernetes()
    server.refusals = [(code, {"Location": "/elsewhere"})] * 2
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: seen.last == addresses("a"))
        assert seen.problems[0] == f"HTTP {code}: refused with {code}"
        await eventually(lambda: not seen.problem)


async def test_an_http_410_leads_to_a_list(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.watches == 1)
        server.refusals = [(410, {})]
        server.cut_streams()
        await eventually(lambda: server.lists == 2)
        await eventually(lambda: not seen.problem)


async def test_retry_after_is_waited_for(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time()
    server.refusals = [(429, {"Retry-After": each}) for each in ("7", "100000", "soon")]
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, time=time) as seen:
        await eventually(lambda: seen.last == addresses("a"))
    assert time.pauses[:2] == [7, 30]
    assert time.pauses[2] < 1


async def test_a_try_that_takes_long_is_followed_by_the_next_one(tmp_path: Path) -> None:
    """Else a server that lets connections time out would be found late."""

    class Slow(Time):
        def __call__(self) -> float:
            self.now += 5
            return self.now

    server, time = FakeKubernetes(), Slow()
    server.refusals = [(500, {})] * 6 + [(429, {"Retry-After": "7"})]
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, time=time) as seen:
        await eventually(lambda: seen.last == addresses("a"))
    assert time.pauses[:7] == [0, 0, 0, 0, 0, 0, 7]


async def test_an_empty_list_after_a_failure_is_asked_for_once_more(tmp_path: Path) -> None:
    """A server that has just begun may not have its objects yet."""
    server, seen, time = FakeKubernetes(), Seen(), Time()
    await put(server, "a")

    async def sleep(seconds: float) -> None:
        if seconds == EMPTY_S:
            await put(server, "a")  # now it has it
        await time.sleep(seconds)

    async with server.serving(), watching(server, tmp_path, sleep=sleep, seen=seen):
        await eventually(lambda: server.watches == 1)
        server.take(SLICES, "a")
        server.version += 1
        await server.compact()
        await eventually(lambda: server.watches == 2)
        assert EMPTY_S in time.pauses
        assert seen.addresses == [addresses("a")]


async def test_what_is_gone_indeed_is_gone_after_the_second_empty_list(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.watches == 1)
        server.take(SLICES, "a")
        server.version += 1
        await server.compact()
        await eventually(lambda: seen.last == [])
        assert server.lists == 3


async def test_an_empty_list_without_a_failure_is_believed_at_once(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, watch_s=1, time=time) as seen:
        await eventually(lambda: server.watches == 1)
        time.now += RELIST_S + 1  # the watch has lasted, and ends without a failure
        server.take(SLICES, "a")
        await eventually(lambda: seen.last == [] and len(seen.addresses) > 1)
        assert server.lists == 2
        assert EMPTY_S not in time.pauses


async def test_a_first_list_without_objects_is_asked_for_once_more_where_there_are_replicas(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time()
    async with server.serving(), watching(server, tmp_path, time=time, expects=True) as seen:
        await eventually(lambda: seen.addresses == [[]])
        assert (server.lists, time.pauses) == (2, [EMPTY_S])


async def test_a_refused_list_does_not_stop_a_watch_that_works(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, watch_s=1, time=time) as seen:
        await eventually(lambda: server.watches == 1)
        server.page = {"kind": "Status"}
        time.now += RELIST_S + 1
        await eventually(lambda: server.lists == 2)
        await put(server, "b")
        await eventually(lambda: seen.last == addresses("a", "b"))
        server.page = ...
        server.take(SLICES, "b")
        time.now += RELIST_RETRY_S + 1
        await eventually(lambda: seen.last == addresses("a"))


async def test_failures_are_counted_from_the_last_list(tmp_path: Path) -> None:
    """Several streaks of them, without a watch that lasts in between."""
    server = FakeKubernetes()
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        for number in range(1, 4):
            await eventually(lambda number=number: server.watches >= number and seen.last == addresses("a"))
            server.refusals = [(504, {})] * 3
            server.cut_streams()
            await eventually(lambda number=number: server.lists > number and not server.refusals)
            await put(server, "a")


GARBAGE = (
    b"no json\n",
    b"[]\n",
    b"null\n",
    b'{"type": "ADDED"}\n',
    b'{"type": "ADDED", "object": {}}\n',
    b'{"type": "ADDED", "object": {"metadata": {"name": "x"}}}\n',
    b'{"type": "STRANGE", "object": {"metadata": {"name": "x", "resourceVersion": "1"}}}\n',
    b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}\n',
    b'{"type": "ERROR", "object": null}\n',
    b'{"type": ' + b"[" * 100_000 + b"\n",
)


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
async def test_an_event_that_cannot_be_read_leads_to_a_list(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeKubernetes()
    server.lines = [line]
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.lists > 2)
        assert seen.last == addresses("a")
        server.lines = []
        await put(server, "b")
        await eventually(lambda: seen.last == addresses("a", "b") and not seen.problem)
    assert [record.message for record in caplog.records].count("the API server does not answer correctly") == 1


async def test_events_before_one_that_cannot_be_read_count(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time(most=1)
    await put(server, "a", "b")
    gone = {"type": "DELETED", "object": {"metadata": {"name": "a", "resourceVersion": "200"}}}
    server.lines = [json.dumps(gone).encode() + b"\nno json\n"]
    async with server.serving(), watching(server, tmp_path, time=time) as seen:
        await eventually(lambda: time.pauses)
        assert seen.last == addresses("b")


LISTS: tuple[object, ...] = (
    [],
    {"items": []},
    {"metadata": {"resourceVersion": "1"}, "items": 5},
    {"metadata": {"resourceVersion": "1"}, "items": [{}]},
    {"metadata": {"resourceVersion": "1", "continue": "again"}, "items": []},
    None,
)


@pytest.mark.parametrize("page", LISTS, ids=range(len(LISTS)))
async def test_a_list_that_cannot_be_read_or_has_no_end_is_a_problem(page: object, tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time(most=1)
    server.page = page
    async with server.serving(), watching(server, tmp_path, time=time) as seen:
        await eventually(lambda: time.pauses)
        assert seen.problem
        assert server.lists <= 100
        assert not seen.addresses


async def test_a_server_with_the_same_nonsense_again_and_again_is_asked_rarely(tmp_path: Path) -> None:
    server, time = FakeKubernetes(), Time(most=12)
    server.lines = [b'{"type": "ERROR", "object": {"code": 410}}\n']
    await put(server, "a")
    async with server.serving(), watching(server, tmp_path, time=time):
        await eventually(lambda: len(time.pauses) == 12)
    assert all(wait == 2.5 * 0.75 for wait in time.pauses[6:]), time.pauses


def event_of(kind: str, name: str, version: int, last: int = 1) -> bytes:
    object_ = slice_of(name, endpoint(address_of(name, last)))
    object_["metadata"]["resourceVersion"] = str(version)
    return json.dumps({"type": kind, "object": object_}).encode() + b"\n"


async def test_events_that_come_twice_change_nothing(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a", "b")
    server.lines = [event_of("MODIFIED", "b", 102), *[event_of("DELETED", "gone", 102)] * 2, event_of("ADDED", "c", 103)]
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: seen.last == addresses("a", "b", "c"))
        assert seen.addresses == [addresses("a", "b"), addresses("a", "b", "c")]
        assert server.lists == 1


LATE = (
    event_of("MODIFIED", "a", 7, last=9),
    event_of("DELETED", "b", 8),
    event_of("ADDED", "c", 9),  # which was deleted before the list
    event_of("MODIFIED", "a", 104, last=9) + event_of("ADDED", "c", 103),
)


@pytest.mark.parametrize("line", LATE, ids=range(len(LATE)))
async def test_a_late_event_leads_to_a_list(line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeKubernetes()
    await put(server, "a", "b")
    server.lines = [line, event_of("ADDED", "d", 110)]
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: server.watches == 1)
        server.lines = []
        await eventually(lambda: server.watches == 2 and not seen.problem)
        assert server.lists == 2
        assert seen.last == addresses("a", "b")
        assert all(address_of("c") not in each for each in seen.addresses)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_what_a_server_sends_has_bounds(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a")
    server.lines = [b"x" * (kubernetes_api.MAX_LINE_BYTES + 1)]
    async with server.serving(), watching(server, tmp_path) as seen:
        await eventually(lambda: "4 MiB" in " ".join(seen.problems))
        server.lines = []
        for number in range(40):  # a page of 20 MB
            await server.put(SLICES, {**slice_of(f"large-{number}"), "filler": "x" * 500_000})
        server.version += 1
        await server.compact()
        await eventually(lambda: "16 MiB" in " ".join(seen.problems))
        assert seen.last


async def test_a_server_that_takes_a_request_and_says_nothing_is_a_problem(tmp_path: Path) -> None:
    server = FakeKubernetes()
    await put(server, "a")
    server.hold_watches.clear()
    async with server.serving():
        api = Api(ApiAccess(server.url, "default"), PATH, LABELS, 100, lambda: 0.0, head_s=0.05)
        with pytest.raises(KubernetesError, match="no answer in time"):
            async for _ in api.watch("1"):
                pass
        await api.close()


async def test_certificates_that_are_replaced_are_read_again(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.crt"
    server, time = FakeKubernetes(), Time()
    await put(server, "a")
    access = ApiAccess(server.url, "default", ca_file=ca_file)
    async with server.serving():
        access = ApiAccess(server.url, "default", ca_file=ca_file)
        async with watching(server, tmp_path, time=time, access=access) as seen:
            await eventually(lambda: "ca.crt: No such file" in seen.problem)
            ca_file.write_text(ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(binary_form=True)[0]))
            await eventually(lambda: seen.last == addresses("a"))


async def test_a_cluster_that_gets_another_authority_is_trusted_once_that_is_in_the_file(tmp_path: Path) -> None:
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    certificate = after.certificate("server", san="IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    ca_file = tmp_path / "ca.crt"
    ca_file.write_text(before.ca.read_text())
    server, time = FakeKubernetes(), Time()
    await put(server, "a")
    async with server.serving(context):
        access = ApiAccess(server.url, "default", ca_file=ca_file)
        async with watching(server, tmp_path, time=time, access=access) as seen:
            await eventually(lambda: "certificate verify failed" in seen.problem)
            ca_file.write_text(after.ca.read_text())
            await eventually(lambda: seen.last == addresses("a"))


def test_outside_of_a_cluster_it_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(KubernetesError, match=r"set kubernetes\.server"):
        access_of(KubernetesConfig(service="vllm"), {}, tmp_path)


def test_inside_of_a_cluster_the_service_account_is_used(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("models\n")
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    found = access_of(KubernetesConfig(service="vllm"), env, tmp_path)
    assert found == ApiAccess("https://[fd00::1]:6443", "models", "", tmp_path / "token", tmp_path / "ca.crt")
    for namespace, prefix in (("models", ""), ("other", "other/")):
        found = access_of(KubernetesConfig(service="vllm", namespace=namespace), env, tmp_path)
        assert (found.namespace, found.prefix) == (namespace, prefix)


def test_another_server_gets_the_token_that_is_meant_for_it_or_none(tmp_path: Path) -> None:
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    config = KubernetesConfig(service="vllm", namespace="n", server="https://a")
    assert access_of(config, env, tmp_path) == ApiAccess("https://a", "n", "n/", None, None)
    given = KubernetesConfig(service="vllm", namespace="n", server="https://a", token_file="/t", ca_file="/c")
    assert access_of(given, env, tmp_path) == ApiAccess("https://a", "n", "n/", Path("/t"), Path("/c"))
