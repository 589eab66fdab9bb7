from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.addresses import AddressError, is_link_local, is_loopback, parse_base_url, shown
from gateway.config.listen import ListenAddress, parse_listen

ipv4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
LINK_LOCAL = ipaddress.IPv4Network("169.254.0.0/16")


def spellings(address: ipaddress.IPv4Address) -> list[str]:
    """Ways to write an IPv4 address that a resolver or an IPv6 socket takes."""
    number = int(address)
    high, low = f"{number >> 16:x}", f"{number & 0xFFFF:x}"
    return [
        str(address),
        f"0x{number:x}",
        ".".join(hex(byte) for byte in address.packed),
        f"{address.packed[0]}.0x{number & 0xFFFFFF:x}",
        f"::ffff:{address}",
        f"[::ffff:{high}:{low}]",
        f"64:ff9b::{high}:{low}",
        f"2002:{high}:{low}::",
    ]


@example(ipaddress.IPv4Address("127.0.0.1"))
@given(ipv4 | st.integers(0, 65535).map(lambda low: LINK_LOCAL[low]))
def test_an_address_is_judged_however_it_is_written(address: ipaddress.IPv4Address) -> None:
    metadata = str(address) in {"100.100.100.200", "192.0.0.192", "168.63.129.16"}
    assert {is_link_local(text) for text in spellings(address)} == {address in LINK_LOCAL or metadata}
    *direct, nat64, six_to_four = spellings(address)
    assert {is_loopback(text) for text in direct} == {address.is_loopback}
    assert not is_loopback(nat64), "it leads through the network"
    assert not is_loopback(six_to_four)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "fe80::1%eth0",
        "[fd00:ec2::254]",
        "[fd00:ec2::254%1]",
        "fd00:ec2::254%eth0",
        "[fd00:ec2::23]",
        "[fd20:ce::254]",
        "[64:ff9b::a9fe:a9fe%1]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[64:ff9b:1:a9fe:a9:fe00::]",
        "[64:ff9b:1:ffa9:fe:a9fe::]",
        "[64:ff9b:1:ffff:a9:fea9:fe00:0]",
        "[64:ff9b:1:ffff::6464:64c8]",
        "100.100.100.200",
        "metadata.google.internal",
        "Metadata.Google.Internal.",
        "metadata",
        "instance-data",
        "0xa9fea9fe",
    ],
)
def test_metadata_services_are_known(host: str) -> None:
    assert is_link_local(host)


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "vllm-0.vllm",
        "metadata.example.com",
        "[2001:db8::1]",
        "[fd00:ec3::254]",
        "[64:ff9b:1::a00:1]",
        "169.253.0.1",
        "localhost",
    ],
)
def test_other_hosts_are_not_link_local(host: str) -> None:
    assert not is_link_local(host)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.nip.io", "127.0.0.1 x"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:1/v1/chat/completions", "http://a:1"),
        ("http://a:1/team/v1/completions/", "http://a:1/team"),
        ("http://a:1/v1/models", "http://a:1"),
    ],
)
def test_the_url_of_an_api_path_is_refused_with_the_base_url(url: str, base: str) -> None:
    with pytest.raises(AddressError, match="is the URL of an API path") as caught:
        parse_base_url(url)
    assert str(caught.value).endswith(f"write {base!r}")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:8001", ListenAddress("127.0.0.1", 8001)),
        ("[::1]:0", ListenAddress("::1", 0)),
        ("unix:/run/warmroute.sock", ListenAddress("", 0, "/run/warmroute.sock")),
        ("off", None),
        ("auto", None),
    ],
)
def test_where_operators_are_answered(text: str, endpoint: ListenAddress | None) -> None:
    assert parse_listen("admin_listen", text) == endpoint
    assert endpoint is None or str(endpoint) == text


@pytest.mark.parametrize("text", ["", "8001", "unix:", "unix:relative", "unix:/" + "x" * 100, "unix:/a\0b", "on", "a b:1"])
def test_where_operators_cannot_be_answered(text: str) -> None:
    with pytest.raises(AddressError):
        parse_listen("admin_listen", text)
    with pytest.raises(AddressError):
        parse_listen("metrics_listen", "unix:/run/x")


@pytest.mark.parametrize(
    ("listen", "url", "same"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("127.0.0.1:8000", "http://localhost:8000/v1", True),
        ("0.0.0.0:8000", "http://127.0.0.1:8000", True),
        ("[::]:8000", "http://[::1]:8000", True),
        ("127.0.0.1:8000", "http://0.0.0.0:8000", True),
        ("127.0.0.1:80", "http://localhost", True),
        ("gateway:8000", "http://GATEWAY:8000", True),
        ("127.0.0.1:8000", "http://127.0.0.2:8000", False),
        ("0.0.0.0:8000", "http://10.0.0.1:8000", False),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", False),
        ("10.0.0.1:8000", "http://127.0.0.1:8000", False),
    ],
)
def test_whether_a_url_leads_back_here(listen: str, url: str, same: bool) -> None:
    endpoint = parse_listen("listen", listen)
    assert endpoint
    assert endpoint.is_at(url) is same


def nested(depth: int, width: int) -> object:
    value: object = "x" * 1000
    for _ in range(depth):
        value = [value] * width
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: nested(9, 9),
        lambda: {"a": nested(9, 9)},
        lambda: list(range(10**6)),
        lambda: "x" * 10**7,
        lambda: 10**4000,
        lambda: -(10**5000),
        lambda: (nested(9, 9),) * 100,
    ],
)
def test_a_value_of_any_size_is_quoted_briefly(make: Callable[[], object]) -> None:
    assert len(shown(make())) <= 60


@given(
    st.none() | st.booleans() | st.integers(-(10**50), 10**50) | st.floats() | st.text(max_size=50) | st.lists(st.integers())
)
def test_a_short_value_is_quoted_as_it_is(value: object) -> None:
    if len(repr(value)) <= 60:
        assert shown(value) == repr(value)
