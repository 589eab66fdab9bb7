"""Reaching a server: alone, over TLS, watched by sentinels, as a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import threading
import tomllib
from functools import partial
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as LostConnection

from gateway.config.addresses import AddressError
from gateway.features.sharing.address import StoreAddress, parse_store_url
from gateway.features.sharing.link import Link
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.section import SharingConfig
from gateway.features.sharing.server.client import LIBRARY, connected, reason_of, store_errors
from gateway.features.sharing.server.failures import explained
from gateway.features.table import new_metrics
from gateway.upstream.resolver import Resolver
from tests.gateway.conftest import eventually
from tests.gateway.features.sharing.conftest import sharing
from tests.gateway.features.sharing.test_link import at, held, together
from tests.gateway.features.sharing.test_slow_store import Seen
from tests.support.compiled import documented
from tests.support.fakes import FakeReplica
from tests.support.paths import ROOT
from tests.support.redis import RedisServer, Sentinel, make_cluster, serving
from tests.support.tools import tool


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", StoreAddress("", False, "", (("h", 6379),), "", 0)),
        ("rediss://me@h:1/3", StoreAddress("", True, "me", (("h", 1),), "", 3)),
        ("redis://[::1]:7", StoreAddress("", False, "", (("::1", 7),), "", 0)),
        ("redis+sentinel://a,b:2/main", StoreAddress("sentinel", False, "", (("a", 26379), ("b", 2)), "main", 0)),
        ("rediss+sentinel://u@a/main/4", StoreAddress("sentinel", True, "u", (("a", 26379),), "main", 4)),
        ("redis+cluster://a:1,b", StoreAddress("cluster", False, "", (("a", 1), ("b", 6379)), "", 0)),
    ],
)
def test_urls(url: str, address: StoreAddress) -> None:
    assert parse_store_url(url) == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://:secret@h", "WARMROUTE_SHARING_PASSWORD"),
        ("redis://me:secret@h", "WARMROUTE_SHARING_PASSWORD"),
        ("http://h", "is expected"),
        ("redis://", "is expected"),
        ("redis://h:99999", "HOST:PORT"),
        ("redis://a,b", "several hosts"),
        ("redis://h/x", "number of a database"),
        ("redis+sentinel://h", "service"),
        ("redis+cluster://h/1", "one database"),
        ("redis://h_?:1", "is expected"),
        ("redis://h h", "is expected"),
    ],
)
def test_urls_that_cannot_be(url: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as caught:
        parse_store_url(url)
    assert "secret" not in str(caught.value)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with ca.pem, and with a certificate of it for 127.0.0.1: cert.pem, key.pem."""

    def openssl(*arguments: str) -> None:
        subprocess.run([tool("openssl"), *arguments], cwd=tmp_path, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test", "-days", "2")
    openssl("req", *new, "-keyout", "key.pem", "-out", "cert.csr", "-subj", "/CN=store")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    issuer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "cert.csr", *issuer, "-out", "cert.pem", "-days", "2")
    return tmp_path


def over_tls(folder: Path) -> RedisServer:
    files = [word for name in ("ca-cert", "cert", "key") for word in (f"--tls-{name}-file", str(folder / f"{name[:2]}.pem"))]
    files = [word.replace("ce.pem", "cert.pem").replace("ke.pem", "key.pem") for word in files]
    return RedisServer(folder, *files, "--tls-auth-clients", "no", tls=True)


async def test_over_tls(certificates: Path) -> None:
    with serving(over_tls(certificates)) as store:
        trusted = at(store, ca_file=str(certificates / "ca.pem"))
        async with FakeReplica() as replica, sharing(replica, **trusted) as one, sharing(replica, **trusted) as two:
            await together(one, two)
            await one.post()
            await eventually(lambda: held(two) == held(one) != {})


async def test_a_certificate_that_is_not_trusted(certificates: Path) -> None:
    with serving(over_tls(certificates)) as store:
        async with FakeReplica() as replica, sharing(replica, **at(store)) as one:
            failed = one.gateway.metrics.of(SharingMetrics).errors.values
            await eventually(lambda: failed[("unreachable",)] > 0)
            assert (await one.post())[0] == 200


async def test_by_its_sentinels(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store, serving(Sentinel(tmp_path, store)) as sentinel:
        url = {"sharing": {"url": f"redis+sentinel://127.0.0.1:{sentinel.port}/main"}}
        async with FakeReplica() as replica, sharing(replica, **url) as one, sharing(replica, **url) as two:
            await together(one, two)
            await one.post()
            await eventually(lambda: held(two) == held(one) != {})


async def test_a_cluster(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path, cluster=True)) as store:
        make_cluster(store)
        url = {"sharing": {"url": f"redis+cluster://127.0.0.1:{store.port}", "cluster": "a{b}c"}}
        async with FakeReplica() as replica, sharing(replica, **url) as one:
            await one.post()
            async with sharing(replica, **url) as two:
                assert held(two) == held(one) != {}, "its keys are at one node"
                await together(one, two)


async def test_a_client_is_closed(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store, store.client as client:
        before = len(client.client_list())
        async with connected(SharingConfig(url=store.url), RESOLVER, {}) as ours:
            await ours.ping()
            assert len(client.client_list()) == before + 1
        await eventually(lambda: len(client.client_list()) == before)


@documented
@pytest.mark.parametrize("kind", ["one", "database", "cluster"])
async def test_the_rights_that_the_documentation_names_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    page = ROOT / "docs" / "scaling.md"
    named = re.search(
        r"`(xadd [^`]*)` on `warmroute:\*`;\nin a cluster also `([^`]*)`, for a database with a number also `([^`]*)`",
        page.read_text(),
    )
    assert named
    more = {"one": "", "cluster": named[2], "database": named[3]}[kind]
    server = RedisServer(tmp_path, cluster=kind == "cluster")
    with serving(server) as store, store.client as client:
        if kind == "cluster":
            make_cluster(store)
        commands = [f"+{name}" for name in f"{named[1]} {more}".split()]
        client.execute_command("ACL", "SETUSER", "gateway", "on", ">secret", "~warmroute:*", *commands)
        monkeypatch.setenv("WARMROUTE_SHARING_PASSWORD", "secret")
        scheme, path = "redis+cluster" if kind == "cluster" else "redis", "/3" if kind == "database" else ""
        url = {"sharing": {"url": f"{scheme}://gateway@127.0.0.1:{store.port}{path}"}}
        async with FakeReplica() as replica, sharing(replica, **url) as one:
            await one.post()
            async with sharing(replica, **url) as two:
                assert held(two) == held(one) != {}
                await together(one, two)
                assert one.gateway.metrics.of(SharingMetrics).errors.values[("denied",)] == 0


# -- its names


def refused(host: str) -> list[str]:
    raise OSError(f"no such name: {host}")


@pytest.mark.parametrize("kind", ["one", "sentinel", "cluster"])
async def test_a_server_by_its_name(tmp_path: Path, kind: str) -> None:
    """Hosts whose names do not resolve are left out."""
    with contextlib.ExitStack() as running:
        store = running.enter_context(serving(RedisServer(tmp_path, cluster=kind == "cluster")))
        url = f"redis://localhost:{store.port}"
        if kind == "cluster":
            make_cluster(store)
            url = f"redis+cluster://a.name.test:1,localhost:{store.port}"
        elif kind == "sentinel":
            sentinel = running.enter_context(serving(Sentinel(tmp_path, store)))
            url = f"redis+sentinel://a.name.test:1,localhost:{sentinel.port}/main"
        resolver = Resolver(lambda host: ["127.0.0.1"] if host == "localhost" else refused(host))
        async with connected(SharingConfig(url=url), resolver, {}) as client:
            assert await client.time()


async def test_a_name_that_does_not_resolve() -> None:
    reason, text = await failure("redis://a.name.test", resolver=Resolver(refused))
    assert reason == "unreachable"
    assert "a.name.test" in text


def test_name_servers_that_do_not_answer_hold_up_no_end() -> None:
    answers = threading.Event()

    def hangs(_host: str) -> list[str]:
        answers.wait()
        return []

    async def share() -> None:
        metrics = new_metrics().of(SharingMetrics)
        connect = partial(connected, resolver=Resolver(hangs))
        link = Link(SharingConfig(url="redis://a.name.test"), "1/256", Seen(), metrics, connect=connect)
        task = asyncio.create_task(link.run())
        await eventually(lambda: metrics.errors.values[("unreachable",)] > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    ended = threading.Thread(target=lambda: asyncio.run(share()), daemon=True)
    ended.start()
    try:
        ended.join(40)
        assert not ended.is_alive()
    finally:
        answers.set()


def test_the_library_is_the_one_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["store"] == [LIBRARY]


# -- what its failures say


RESOLVER = Resolver()


async def failure(url: str, env: dict[str, str] | None = None, resolver: Resolver = RESOLVER, **files: Path) -> tuple[str, str]:
    """(reason, text)"""
    config, variables = SharingConfig(url=url, **{name: str(path) for name, path in files.items()}), env or {}
    with pytest.raises(store_errors()) as caught:
        async with connected(config, resolver, variables) as client:
            await client.time()
    return reason_of(caught.value), explained(caught.value, config, variables)


WRONG = {"WARMROUTE_SHARING_PASSWORD": "wrong-one", "WARMROUTE_SHARING_SENTINEL_PASSWORD": "wrong-one"}


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
async def test_a_password_that_is_refused_or_missing(kind: str, tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path, password="right-one")) as store:
        url = store.url.replace("redis", kind)
        reason, text = await failure(url, WRONG)
        assert reason == "denied"
        assert text.endswith(
            "the password in WARMROUTE_SHARING_PASSWORD is refused: does it belong to the user in sharing.url?"
        )
        assert "wrong-one" not in text
        reason, text = await failure(url)
        assert (reason, text.partition("; ")[2]) == ("denied", "it requires a password: set WARMROUTE_SHARING_PASSWORD")


async def test_a_password_that_is_not_wanted(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store:
        reason, text = await failure(store.url, WRONG)
        assert (reason, text.partition("; ")[2]) == (
            "denied",
            "WARMROUTE_SHARING_PASSWORD is set, but the server has no password",
        )


async def test_a_right_that_is_missing(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store, store.client as client:
        client.execute_command("ACL", "SETUSER", "gateway", "on", ">wrong-one", "~*", "+ping")
        reason, text = await failure(store.url.replace("//", "//gateway@"), WRONG)
        assert reason == "denied"
        assert "docs/scaling.md" in text


async def test_sentinels_that_refuse_the_password(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store, serving(Sentinel(tmp_path, store, "right-one")) as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        where = "the sentinels in sharing.url do not say where the server is: AuthenticationError; "
        wants, refused = "it requires a password: set {}", "the password in {} is refused"
        for env, hint in ({}, wants), (WRONG, refused):
            assert await failure(url, env) == ("denied", where + hint.format("WARMROUTE_SHARING_SENTINEL_PASSWORD"))


async def test_sentinels_that_know_no_such_name(tmp_path: Path) -> None:
    with serving(RedisServer(tmp_path)) as store, serving(Sentinel(tmp_path, store)) as sentinel:
        reason, text = await failure(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
        assert reason == "unreachable"
        assert "'other'" in text
    assert await failure(f"redis+sentinel://127.0.0.1:{sentinel.port}/main") == (
        "unreachable",
        "the sentinels in sharing.url do not say where the server is: ConnectionError",
    )


async def test_a_cluster_that_is_down_is_no_bug(tmp_path: Path) -> None:
    store = RedisServer(tmp_path)
    assert (await failure(store.url.replace("redis", "redis+cluster")))[0] == "unreachable"


async def test_tls_where_there_is_none_and_the_other_way_round(certificates: Path, tmp_path: Path) -> None:
    with serving(over_tls(certificates)) as store, serving(RedisServer(tmp_path)) as plain:
        reason, text = await failure(store.url.replace("rediss", "redis"))
        assert (reason, text.partition("; ")[2]) == (
            "unreachable",
            "if the server requires TLS, sharing.url must begin with rediss",
        )
        reason, text = await failure(plain.url.replace("redis", "rediss"))
        assert (reason, text.partition("; ")[2]) == (
            "unreachable",
            "if the server does not speak TLS, sharing.url must begin with redis",
        )


@pytest.mark.parametrize("text", ["Connection closed by server.", "Error 32 while writing to socket. Broken pipe."])
def test_one_that_worked_has_the_right_url(text: str) -> None:
    """A server that is restarted closes its connections, as one does that takes nothing but TLS."""
    error = LostConnection(text)
    config = SharingConfig(url="redis://h")
    assert explained(error, config, {}).endswith("must begin with rediss")
    assert explained(error, config, {}, worked=True) == f"ConnectionError: {text}"


async def test_certificates_that_do_not_fit(certificates: Path) -> None:
    with serving(over_tls(certificates)) as store:
        reason, text = await failure(store.url)
        assert text.endswith("sharing.ca_file must contain the authority that issued its certificate")
        reason, text = await failure(store.url.replace("127.0.0.1", "localhost"), ca_file=certificates / "ca.pem")
        assert text.endswith("its certificate is for another host than sharing.url names")
        assert reason == "unreachable"


@pytest.mark.parametrize("name", ["ca_file", "cert_file"])
async def test_a_file_that_cannot_be_used_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / "some.pem"
    assert await failure("rediss://127.0.0.1:1", **{name: file}) == (
        "unreachable",
        f"OSError: sharing: the file {file} does not exist",
    )
    file.write_text("no PEM")
    reason, text = await failure("rediss://127.0.0.1:1", **{name: file})
    assert reason == "unreachable"
    assert f"{file} cannot be used" in text
