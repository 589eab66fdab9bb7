"""Reaching a server: alone, over TLS, watched by sentinels, as a cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gateway.cluster.store.client import connected
from gateway.config.addresses import AddressError, StoreAddress, parse_store_url
from gateway.config.schema import SharingConfig
from tests.gateway.cluster.store.conftest import sharing
from tests.gateway.cluster.store.test_link import at, held, together
from tests.gateway.conftest import eventually
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
            failed = one.gateway.metrics.sharing_errors.values
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
    with serving(RedisServer(tmp_path, "--cluster-enabled", "yes")) as store:
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
        async with connected(SharingConfig(url=store.url), {}) as ours:
            await ours.ping()
            assert len(client.client_list()) == before + 1
        await eventually(lambda: len(client.client_list()) == before)


async def test_the_rights_that_the_documentation_names_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "scaling.md"
    if not page.exists():
        pytest.skip("the documentation is not beside these tests")
    rights = re.search(r"`(xadd [^`]*)` on `warmroute:\*`", page.read_text())
    assert rights
    with serving(RedisServer(tmp_path)) as store, store.client as client:
        commands = [f"+{name}" for name in rights[1].split()]
        client.execute_command("ACL", "SETUSER", "gateway", "on", ">secret", "~warmroute:*", *commands)
        monkeypatch.setenv("WARMROUTE_SHARING_PASSWORD", "secret")
        url = {"sharing": {"url": f"redis://gateway@127.0.0.1:{store.port}"}}
        async with FakeReplica() as replica, sharing(replica, **url) as one:
            await one.post()
            async with sharing(replica, **url) as two:
                assert held(two) == held(one) != {}
                await together(one, two)
                assert one.gateway.metrics.sharing_errors.values[("denied",)] == 0
