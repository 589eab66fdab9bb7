"""Converts content blocks to parts of a chat message: texts, images, files."""

from __future__ import annotations

from typing import Any

from gateway.errors import GatewayError, bad_request
from gateway.features.translation.rules import Omissions, text_for


def kind_of(block: Any, where: str, number: int) -> str:
    """The type of a block. where, number: its list, and its index there. Raises GatewayError 400 if it is not a block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        text = f"{where}[{number}] must be an object with a 'type'."
        raise bad_request(text, f"{where}[{number}]")
    return kind


def text_of(block: dict[str, Any], where: str, number: int) -> str:
    """The text of a text block."""
    text = block.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}[{number}].text must be a string.", f"{where}[{number}].text")
    return text


def string_of(holder: dict[str, Any], name: str, where: str) -> str:
    """A member that must be a string."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} is required and must be a string.", f"{where}.{name}")
    return value


def add_parts(parts: list[Any], block: Any, where: str, number: int, left_out: Omissions) -> None:
    """Converts a block to parts of a message: a text, an image, a document, or any other by its rule (`rules.py`)."""
    kind = kind_of(block, where, number)
    if kind == "text":
        parts.append({"type": "text", "text": text_of(block, where, number)})
    elif kind == "image":
        parts.append(_image(block, f"{where}[{number}].source"))
    elif kind == "document":
        _add_document(parts, block, f"{where}[{number}]", left_out)
    elif text := text_for(block, left_out):
        parts.append(_text(text))


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    source = _source(block, where)
    kind = source.get("type")
    if kind == "base64":
        url = f"data:{string_of(source, 'media_type', where)};base64,{string_of(source, 'data', where)}"
    elif kind == "url":
        url = string_of(source, "url", where)
    else:
        raise _no_source(where, "'base64' or 'url'")
    return {"type": "image_url", "image_url": {"url": url}}


def _add_document(parts: list[Any], block: dict[str, Any], where: str, left_out: Omissions) -> None:
    """A text document with its title and context, or a PDF as a file."""
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        left_out.add("citations", "no model here cites")
    title, context = block.get("title"), block.get("context")
    heads = [head for head in (title, context) if isinstance(head, str) and head]
    place = f"{where}.source"
    source = _source(block, place)
    kind = source.get("type")
    if kind == "text":
        parts.append(_text("\n\n".join([*heads, string_of(source, "data", place)])))
        return
    parts.extend(map(_text, heads))
    if kind == "base64":
        url = f"data:{string_of(source, 'media_type', place)};base64,{string_of(source, 'data', place)}"
        name = title if isinstance(title, str) and title else "document.pdf"
        parts.append({"type": "file", "file": {"filename": name, "file_data": url}})
    elif kind == "content":
        _add_inner(parts, source.get("content"), f"{place}.content", left_out)
    else:
        raise _no_source(place, "'text', 'base64' or 'content'")


def _add_inner(parts: list[Any], content: Any, where: str, left_out: Omissions) -> None:
    """The content of a document: a text, or text and image blocks."""
    if isinstance(content, str):
        parts.append(_text(content))
        return
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content blocks.", where)
    for number, block in enumerate(content):
        if kind_of(block, where, number) == "document":
            raise bad_request(f"{where}[{number}].type: documents do not nest.", f"{where}[{number}].type")
        add_parts(parts, block, where, number, left_out)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _source(block: dict[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise bad_request(f"{where} is required and must be an object.", where)
    return source


def _no_source(where: str, known: str) -> GatewayError:
    return bad_request(
        f"{where}.type must be {known} for the replicas of this model: they cannot fetch others.", f"{where}.type"
    )
