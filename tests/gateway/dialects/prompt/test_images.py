"""The size of an image, by the head of its data; Pillow makes the images."""

from __future__ import annotations

import base64
import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gateway.dialects.prompt.images import MAX_TOKENS, UNKNOWN_TOKENS, data_tokens, image_tokens


def encoded(kind: str, width: int, height: int, **options: object) -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, kind, **options)
    return base64.b64encode(data.getvalue()).decode()


def expected(width: int, height: int) -> int:
    return max(1, min(MAX_TOKENS, math.floor(width * height / 784)))


@settings(max_examples=25)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]), st.integers(1, 900), st.integers(1, 900))
def test_width_and_height_give_the_tokens(kind: str, width: int, height: int) -> None:
    data = encoded(kind, width, height)
    assert data_tokens(data) == expected(width, height)
    assert image_tokens(f"data:image/{kind.lower()};base64,{data}") == expected(width, height)


def test_other_forms_of_the_same_formats() -> None:
    assert data_tokens(encoded("WEBP", 300, 200, lossless=True)) == expected(300, 200)
    assert data_tokens(encoded("WEBP", 300, 200, exif=b"Exif\0\0" + b"x" * 50)) == expected(300, 200)
    assert data_tokens(encoded("JPEG", 300, 200, progressive=True)) == expected(300, 200)
    assert data_tokens(encoded("JPEG", 300, 200, exif=b"Exif\0\0" + b"x" * 60_000, comment=b"y" * 9000)) == expected(300, 200)


def test_a_large_image_is_scaled_down_by_its_model() -> None:
    assert data_tokens(encoded("PNG", 8000, 6000)) == MAX_TOKENS


@pytest.mark.parametrize(
    "url", ["https://example.org/x.png", "data:image/png,abc", "data:text/plain;base64,AAAA", "", "data:image/"]
)
def test_what_shows_no_size_counts_as_usual(url: str) -> None:
    assert image_tokens(url) == UNKNOWN_TOKENS


@given(
    st.binary(max_size=300), st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8", b""])
)
def test_garbage_counts_too(data: bytes, begin: bytes) -> None:
    assert 1 <= data_tokens(base64.b64encode(begin + data).decode()) <= MAX_TOKENS


@given(st.text(max_size=100))
def test_what_is_no_base64_counts_too(text: str) -> None:
    assert 1 <= data_tokens(text) <= MAX_TOKENS


def test_a_jpeg_that_is_all_segments_is_not_read_to_its_end() -> None:
    endless = b"\xff\xd8" + b"\xff\xe0\x00\x04ab" * 100_000
    assert data_tokens(base64.b64encode(endless).decode()) == UNKNOWN_TOKENS
