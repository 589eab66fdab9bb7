"""Parts of a content: texts, images, files, and parts of unknown types. Pure.

Media count by their decoded bytes, independently of the dialect's spelling and of the media type. Addresses count as addresses.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import sha256
from typing import Any, Final

from gateway.features.prompt_log.naming.canonical import HALF_A_PAIR, NoNameError, canonical
from gateway.features.prompt_log.naming.entries import UNPRINTED, object_in, text_in, without

_TEXTS: Final = frozenset(["text", "input_text", "output_text"])
_IMAGES: Final = frozenset(["image_url", "input_image", "image"])
_FILES: Final = frozenset(["file", "input_file", "document"])
_OF_TEXT: Final = UNPRINTED | {"type", "text"}
_BASE64: Final = ";base64,"
_URL_HEAD: Final = 100  # characters of a data URL before its data
_EMPTY: Final = {"text": ""}


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The parts of a content: a text, a list of parts, or null. Raises NoNameError."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"text": content}] if content else []
    if not isinstance(content, list):
        raise NoNameError("the content is neither a text nor a list")
    found = [_part_of(part) for part in content]
    return [part for part in found if part != _EMPTY]


def _part_of(part: Any) -> dict[str, Any]:
    if isinstance(part, str):  # engines accept it for a text
        return {"text": part}
    kind = object_in(part, "a part of the content").get("type", "text")
    if kind in _TEXTS:
        more = without(part, _OF_TEXT)
        text = text_in(part.get("text"), "the text of a part")
        return {"text": text, "more": more} if more else {"text": text}
    if kind == "refusal":
        return {"text": text_in(part.get("refusal"), "a refusal")}
    if kind in _IMAGES and (image := _image_of(part)):
        return image
    if kind in _FILES and (file := _file_of(part)):
        return file
    return unknown_part(text_in(kind, "the type of a part"), part, UNPRINTED)


def unknown_part(kind: str, part: dict[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """A part of an unknown type: its digest. Raises NoNameError."""
    return {"part": kind, "sha256": sha256(canonical(without(part, left_out))).hexdigest()}


def _image_of(part: dict[str, Any]) -> dict[str, Any] | None:
    image, source, url, detail = part.get("image_url"), part.get("source"), None, None
    if isinstance(image, dict):
        url, detail = image.get("url"), image.get("detail")
    else:
        url, detail = image, part.get("detail")
    more = {"detail": detail} if detail not in (None, "auto") else {}
    if isinstance(source, dict):
        if source.get("type") == "base64":
            digest = _digest_of(source.get("data"))
            return {"image": digest} if digest else None
        if source.get("type") == "url":
            url = source.get("url")
    if not isinstance(url, str):
        return None
    if url.startswith("data:") and _BASE64 in url[:_URL_HEAD] and (digest := _digest_of(url.partition(_BASE64)[2])):
        return {"image": digest, **more}
    return {"image_url": url, **more}


def _file_of(part: dict[str, Any]) -> dict[str, Any] | None:
    inner, source = part.get("file"), part.get("source")
    called = part.get("title") or part.get("filename") or (inner.get("filename") if isinstance(inner, dict) else None)
    more = {"name": called} if called else {}
    if part.get("context"):
        more["context"] = part["context"]
    for holder, member in ((part, "file_data"), (inner, "file_data"), (source, "data")):
        if not isinstance(holder, dict) or holder.get("type") == "text":
            continue
        data = holder.get(member)
        if isinstance(data, str) and (digest := _digest_of(data.partition(_BASE64)[2] or data)):
            return {"file": digest, **more}
    if isinstance(source, dict) and source.get("type") == "text":
        text = text_in(source.get("data"), "the data of a document")
        try:
            return {"file": sha256(text.encode()).hexdigest(), **more}
        except UnicodeEncodeError:
            raise NoNameError(HALF_A_PAIR) from None
    return None


def _digest_of(data: Any) -> str:
    """The digest of the bytes in base64; "": it is none."""
    try:
        return sha256(base64.b64decode(data, validate=True)).hexdigest()
    except (binascii.Error, ValueError, TypeError):
        return ""
