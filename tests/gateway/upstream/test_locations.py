"""`Location` headers: a replica's own URL becomes a path, any other one is left."""

from __future__ import annotations

import asyncio
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.locations import relative
from tests.gateway.conftest import running
from tests.support.fakes import FakeReplica, FakeRequest, http


def located(location: str, base: str) -> str:
    """What a client gets from the replica at this base URL."""
    parts = urlsplit(base)
    raw = location.encode("latin-1")
    return relative(raw, tls=parts.scheme == "https", netloc=parts.netloc, path=parts.path).decode("latin-1")


@pytest.mark.parametrize(
    ("location", "base", "expected"),
    [
        ("http://10.0.0.5:8000/v1/files/1?a=b#c", "http://10.0.0.5:8000", "/v1/files/1?a=b#c"),
        ("HTTP://Replica:8000/v1/x", "http://replica:8000", "/v1/x"),
        ("http://replica/v1/x", "http://replica:80", "/v1/x"),
        ("https://replica:443/v1/x", "https://replica", "/v1/x"),
        ("http://replica/v1/x", "https://replica", "/v1/x"),  # the engine does not know of the TLS proxy before it
        ("//replica:8000/v1/x", "http://replica:8000", "/v1/x"),
        ("//replica/v1/x", "https://replica:443", "/v1/x"),
        ("http://[FD00::1]:8000/v1/x", "http://[fd00::1]:8000", "/v1/x"),
        ("http://user:secret@replica:8000/v1/x", "http://replica:8000", "/v1/x"),
        (" http://replica:8000/é", "http://replica:8000", "/é"),
        ("http://replica:8000", "http://replica:8000", "/"),
        ("http://replica:8000?a", "http://replica:8000", "/?a"),
        ("http://replica:8000#a", "http://replica:8000", "/#a"),
        ("http://replica:8000/base/v1/x", "http://replica:8000/base", "/v1/x"),
        ("http://replica:8000/base", "http://replica:8000/base", "/"),
        ("http://replica:8000/base?a", "http://replica:8000/base", "/?a"),
        ("http://replica:8000/baseline/x", "http://replica:8000/base", "/baseline/x"),
        ("http://replica:8000//evil.example/x", "http://replica:8000", "/evil.example/x"),
        ("http://replica:8000/base//evil.example", "http://replica:8000/base", "/evil.example"),
        ("http://replica:8000/\\evil.example", "http://replica:8000", "/evil.example"),
        ("http://replica:8000\\evil.example", "http://replica:8000", "/evil.example"),
    ],
)
def test_a_url_of_the_replica_becomes_a_path(location: str, base: str, expected: str) -> None:
    assert located(location, base) == expected


@pytest.mark.parametrize(
    "location",
    [
        "/v1/files/1",
        "files/1",
        "?page=2",
        "",
        "http://elsewhere:8000/v1/x",
        "http://replica:8001/v1/x",
        "http://replica/v1/x",
        "https://replica/v1/x",
        "http://replica:8000.example.com/v1/x",
        "http://replica:8000@example.com/v1/x",
        "http://replica.:x/v1",
        "http://[replica:8000/v1/x",
        "mailto:replica:8000",
        "/login?next=http://replica:8000/",
    ],
)
def test_any_other_location_is_left(location: str) -> None:
    assert located(location, "http://replica:8000") == location


@given(st.text("/\\?#@:.ab[]", max_size=12))
def test_no_location_of_the_replica_leads_to_another_host(rest: str) -> None:
    out = located("http://replica:8000/" + rest, "http://replica:8000/a")
    assert urlsplit(urljoin("http://gateway/v1/y", out.replace("\\", "/"))).netloc == "gateway"


async def redirects(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """Redirects as engines do, to a URL made of the Host; its content it names by that of a fixed replica."""
    own = f"http://{request.headers['host']}{request.path}/"
    writer.write(http(307, b"", "text/plain", f"Location: {own}", "Content-Location: http://first:9/v1/a", "X-Other: 1"))


async def test_clients_do_not_learn_a_replicas_address_from_redirects() -> None:
    async with FakeReplica([redirects]) as one, running(one) as run:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/chat/completions"), ("POST", "/v1/files")):
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} if method == "POST" else None
            async with run.session.request(method, run.url + path, json=body, allow_redirects=False) as answer:
                assert answer.status == 307
                assert answer.headers["Location"] == path + "/"
                assert answer.headers["Content-Location"] == "http://first:9/v1/a"
                assert answer.headers["X-Other"] == "1"
                assert str(one.port) not in str(
                    {name: value for name, value in answer.headers.items() if "Warmroute" not in name}
                )


async def test_the_same_head_from_two_replicas_is_not_the_same_answer() -> None:
    """Heads are parsed once for all replicas that send the same bytes; whose URL it is depends on the replica."""
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:

        async def names_the_first(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
            writer.write(http(201, b"{}", "application/json", f"Location: {one.url}/v1/files/1"))

        one.script = two.script = (names_the_first,)
        found = dict[str, str]()
        while len(found) < 2:
            async with run.session.post(run.url + "/v1/files", data=b"x") as answer:
                found[answer.headers["X-Warmroute-Replica"]] = answer.headers["Location"]
        assert found == {one.name: "/v1/files/1", two.name: f"{one.url}/v1/files/1"}
