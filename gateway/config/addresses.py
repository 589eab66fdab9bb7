"""Parses and classifies hosts, ports and base URLs of the configuration. Pure: nothing is resolved here.

`is_loopback` and `is_link_local` classify the written form. A name may resolve to any address: `dialer.py` checks that again.
"""

from __future__ import annotations

import ipaddress
import re
import reprlib
import socket
from typing import Final
from urllib.parse import urlsplit

MAX_URL: Final = 4096  # characters; a longer one would take long to check
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")  # an IPv6 address, optionally with a zone
_NUMBERS = re.compile(r"[0-9][0-9A-Fa-fxX]*(\.[0-9][0-9A-Fa-fxX]*){0,3}\.?")  # possibly an IPv4 address by C's rules
_BASE_URL = re.compile(
    r"(?i:https?)://(?P<host>\[[^\]]+\]|[^\[\]:/?#]+)(?P<port>:[^/?#]*)?(?P<path>(/([\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*)",
    re.ASCII,
)
# API paths that are often copied into a base URL.
_API_PATH = re.compile(r"/v1/(chat/completions|completions|embeddings|models|responses|messages|score|rerank|tokenize)/*\Z")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Cloud metadata services that are not link-local. All of AWS's over IPv6 (metadata, EKS pod identity, DNS, time) are in one
# network; then Google over IPv6, Alibaba, Oracle, Azure.
_METADATA_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        ("fd00:ec2::/64", "fd20:ce::/64", "100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32"),
    )
)
_METADATA_NAMES = frozenset(
    [
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.azure.com",
        "metadata.azure.internal",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.platformequinix.com",
        "metadata.tencentyun.com",
    ]
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215: any prefix in it may be in use
# The bytes of an address that hold the IPv4 address, after a prefix of 48, 56, 64 or 96 bits (RFC 6052, section 2.2).
_EMBEDDED = ((6, 7, 9, 10), (7, 9, 10, 11), (9, 10, 11, 12), (12, 13, 14, 15))


class AddressError(ValueError):
    """A host, port or URL is invalid; the message has the expected form."""


def parse_base_url(url: str) -> tuple[str, str]:
    """(URL without a trailing /v1, its host:port). Raises AddressError, which does not show credentials."""
    if len(url) > MAX_URL:
        raise AddressError(f"{shown(url)} has more than {MAX_URL:,} characters")
    netloc = url.partition("://")[2].partition("/")[0]
    if "@" in netloc:
        raise AddressError("credentials do not belong in a URL; clients' Authorization headers are passed on")
    match = _BASE_URL.fullmatch(url)
    if not match or not is_host(match["host"]):
        raise AddressError(f"{shown(url)} is not a base URL such as http://127.0.0.1:9001")
    if match["port"] and not parse_port(match["port"][1:]):
        raise AddressError(f"{shown(url)} has no valid port")
    if path := _API_PATH.search(match["path"]):
        base = url[: len(url) - len(path[0])]
        raise AddressError(f"{shown(url)} is the URL of an API path, not a base URL; write {shown(base)}")
    # Engines document base URLs that end in /v1; the gateway adds /v1 itself.
    return url.rstrip("/").removesuffix("/v1"), netloc


def is_host(host: str) -> bool:
    """True for a valid host name, an IPv4 address, or an IPv6 address in brackets."""
    try:
        if _BRACKETED.fullmatch(host):
            ipaddress.IPv6Address(host[1:-1])
        elif not host.strip("0123456789."):
            ipaddress.IPv4Address(host)
        else:
            return _HOST.fullmatch(host) is not None
    except ValueError:
        return False
    return True


def dns_name(text: str) -> str:
    """A DNS name to be looked up. Raises AddressError, also for IP addresses."""
    if not is_host(text) or address_of(text) is not None:
        raise AddressError(f"{shown(text)} is not a DNS name such as vllm.models.svc.cluster.local")
    return text.lower()


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """host: a name or an IP address, without brackets."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def parse_port(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and int(text) <= 65535 else None


def host_and_port(base_url: str) -> tuple[str, int]:
    """base_url: validated by `parse_base_url`."""
    parts = urlsplit(base_url)
    return parts.hostname or "", parts.port or (443 if parts.scheme.lower() == "https" else 80)


def is_local(peer: object) -> bool:
    """True if a socket's peer is on this machine. peer: a tuple with the host first; for a Unix socket, a string."""
    return is_loopback(str(peer[0])) if isinstance(peer, tuple) else isinstance(peer, str | bytes)


def is_loopback(host: str) -> bool:
    """True for `localhost`, 127.0.0.0/8, ::1, and 127.0.0.0/8 as an IPv4-mapped address.

    Not for a 6to4 or NAT64 address that embeds 127.0.0.1: it leads through the network.
    """
    address = address_of(host)
    if address is None:
        return host.lower() == "localhost"
    try:
        written = ipaddress.IPv6Address(host.strip("[]"))
    except ValueError:
        return address.is_loopback
    return written.is_loopback or (written.ipv4_mapped is not None and written.ipv4_mapped.is_loopback)


def is_wildcard(host: str) -> bool:
    """True for the unspecified address, which listens on all addresses."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def is_link_local(host: str) -> bool:
    """True for link-local addresses, the metadata services of clouds, and the names of the latter."""
    address = address_of(host)
    if address is None:
        return host.lower().rstrip(".") in _METADATA_NAMES
    return any(_is_link_local(each) for each in (address, *_embedded(address)))


def _is_link_local(address: IPAddress) -> bool:
    return address.is_link_local or any(address in network for network in _METADATA_NETWORKS)


def _embedded(address: IPAddress) -> list[IPAddress]:
    """The IPv4 addresses to which a local NAT64 may translate the address; its prefix length is unknown."""
    if address not in _LOCAL_NAT64:
        return []
    return [ipaddress.IPv4Address(bytes(address.packed[at] for at in places)) for places in _EMBEDDED]


def address_of(host: str) -> IPAddress | None:
    """The IP address in the text; None for a name.

    An IPv4 address embedded in an IPv6 one is returned as IPv4, and so are other forms that resolvers accept (0xa9fea9fe,
    0xa9.254.0xa9fe). The zone of an IPv6 address is ignored.
    """
    host = host.strip("[]")
    if ":" in host:
        host = host.partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _number_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(address.packed[-4:])
        return inner or address
    return address


def _number_of(host: str) -> IPAddress | None:
    if not _NUMBERS.fullmatch(host):  # `inet_aton` ignores text after a space
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
    except OSError:
        return None


def shown(value: object) -> str:
    """A value for error messages, 60 characters at most. O(1) in the size of the value."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _ShortRepr(reprlib.Repr):
    """`repr` of the beginning of a value: with YAML aliases a few bytes can print as gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother = 2, 60
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 20

    def repr_str(self, value: str, level: int) -> str:
        return repr(value if len(value) <= 60 else value[:60])

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() <= 200 else f"a number of {value.bit_length()} bits"


_SHORT: Final = _ShortRepr()
