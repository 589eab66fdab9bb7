"""Compressed bodies: whatever way they are cut, and bombs."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.server.http.inflate import DEFLATE, GZIP, MAX_MEMBERS, RATIO_FROM, SLICE, Inflater

LIMIT = 8 << 20


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def inflate(coding: str, *chunks: bytes, limit: int = LIMIT) -> bytes:
    inflater, parts = Inflater(coding, limit), list[bytes]()
    for chunk in chunks:
        inflater.feed(chunk)
        while part := inflater.take():
            assert len(part) <= SLICE
            parts.append(part)
    inflater.finish()
    return b"".join(parts)


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (GZIP, gzip.compress),
    "zlib": (DEFLATE, zlib.compress),
    "raw": (DEFLATE, raw_deflate),
}


@pytest.mark.parametrize("name", PACKERS)
@given(
    data=st.binary(max_size=2000) | st.builds(bytes.__mul__, st.binary(max_size=9), st.integers(0, 100_000)),
    size=st.integers(1, 5000),
)
def test_any_cutting_gives_what_was_compressed(name: str, data: bytes, size: int) -> None:
    coding, pack = PACKERS[name]
    packed = pack(data)
    assert inflate(coding, *(packed[at : at + size] for at in range(0, len(packed), size))) == data


@pytest.mark.parametrize("name", PACKERS)
def test_what_is_cut_short_or_goes_on_is_refused(name: str) -> None:
    coding, pack = PACKERS[name]
    packed = pack(os.urandom(5000))
    for broken in (packed[:-1], packed[: len(packed) // 2], packed + b"more", b"\xff" * 40):
        with pytest.raises(GatewayError) as caught:
            inflate(coding, broken)
        assert (caught.value.status, caught.value.code) == (400, "invalid_body")


def test_nothing_is_nothing() -> None:
    assert inflate(GZIP) == inflate(GZIP, b"") == b""


def test_a_gzip_body_may_have_several_members() -> None:
    assert inflate(GZIP, gzip.compress(b"a") + gzip.compress(b"") + gzip.compress(b"b")) == b"ab"
    with pytest.raises(GatewayError):
        inflate(GZIP, gzip.compress(b"") * (MAX_MEMBERS + 1))


def test_a_body_may_not_become_longer_than_the_limit() -> None:
    data = os.urandom(1000) * 400
    assert inflate(GZIP, gzip.compress(data), limit=len(data)) == data
    with pytest.raises(GatewayError) as caught:
        inflate(GZIP, gzip.compress(data), limit=len(data) - 1)
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_what_is_fed_has_the_same_limit() -> None:
    """Empty blocks give no output, and could go on for ever."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    empty = packer.flush(zlib.Z_FULL_FLUSH)
    inflater = Inflater(DEFLATE, 10_000)
    for _ in range(10_000 // len(empty)):
        inflater.feed(empty)
        assert inflater.take() == b""
    with pytest.raises(GatewayError) as caught:
        inflater.feed(empty)
    assert caught.value.status == 413


@pytest.mark.parametrize("name", PACKERS)
def test_a_bomb_is_refused_after_its_first_megabyte(name: str) -> None:
    coding, pack = PACKERS[name]
    inflater, made = Inflater(coding, 1 << 30), 0
    inflater.feed(pack(b"[{}]" * (16 << 20)))
    with pytest.raises(GatewayError) as caught:  # noqa: PT012
        while part := inflater.take():
            made += len(part)
    assert made <= RATIO_FROM + SLICE
    assert caught.value.status == 413
    assert "100 times" in caught.value.message


def test_what_shrinks_as_prompts_do_is_taken() -> None:
    text = (b'{"role":"user","content":"' + os.urandom(30).hex().encode() * 3 + b'"},') * 20_000
    assert len(gzip.compress(text)) * 100 < len(text) * 2
    for data in (
        text[:RATIO_FROM],
        b"".join(b'{"role":"user","content":"%b"},' % os.urandom(99).hex().encode() for _ in range(9000)),
    ):
        assert inflate(GZIP, gzip.compress(data)) == data
