"""The content of a turn: a text, or a list of parts. The same in all dialects, which name the types of parts differently.

Text is written unchanged. An image or a file is written as a digest, because only its identity matters, repeated to the length
that its tokens would have as text. Parts of any other type are digests, too: a dialect's new type of part is no error here.
"""

from __future__ import annotations

from typing import Any, Final

import xxhash

from gateway.dialects.prompt.canonical import DIGEST, PART, CanonicalPrompt, to_json, without
from gateway.dialects.prompt.images import data_tokens, image_tokens
from gateway.dialects.prompt.marks import MARKER, OPENAI_MARKER
from gateway.errors import bad_request

TEXT_TYPES: Final = frozenset(["text", "input_text", "output_text"])
# Fields of a text that no template prints: markers for a provider's cache, and a server's notes about its own answer.
NOT_PRINTED: Final = ("type", "text", MARKER, OPENAI_MARKER, "citations", "annotations", "logprobs")

_BYTES_PER_TOKEN: Final = 4
_OPAQUE_TOKENS: Final = 1000  # at most, of a part of an unknown type: a sound, a search result
_FILE_BYTES_PER_TOKEN: Final = 33  # bytes of base64: a page of a PDF has some 2,000 tokens, and 50 kB
_MAX_FILE_TOKENS: Final = 100_000
_INPUT_IMAGE: Final = "input_image"
_FILES: Final = frozenset(["document", "file", "input_file"])


def add_content(prompt: CanonicalPrompt, content: Any, where: str) -> None:
    """Adds a text, or a list of parts; nothing for None. where: its name in errors. Raises GatewayError 400, NeedsHelper."""
    if isinstance(content, str):
        prompt.parts.append(content.encode())
        return
    if content is None:
        return
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of content parts.", where)
    prompt.require(2 * len(content) - 1)  # each part, and the separators between them
    # One text part reads as the plain string: templates print both alike.
    for number, part in enumerate(content):
        if number:
            prompt.parts.append(PART)
        prompt.parts.append(part_bytes(prompt, part, where))


def part_bytes(prompt: CanonicalPrompt, part: Any, where: str) -> bytes:
    """One part of a content as bytes of the prompt. Raises GatewayError 400 if it is no object."""
    if not isinstance(part, dict):
        raise bad_request(f"{where}: each content part must be an object with a 'type'.", where)
    kind, text = part.get("type", "text"), part.get("text")
    if not isinstance(kind, str):
        return _opaque(prompt, part)
    if not isinstance(text, str) or kind not in TEXT_TYPES:
        prompt.marks.add(part, len(prompt.parts) + 1)
        return _no_text(prompt, kind, part)
    if len(part) == 1 + ("type" in part):
        return text.encode()
    prompt.marks.add(part, len(prompt.parts) + 1)
    if len(part) == 1 + ("type" in part) + (MARKER in part):
        return text.encode()
    others = without(part, *NOT_PRINTED)
    return text.encode() + DIGEST + _digest(others) if others else text.encode()


def _no_text(prompt: CanonicalPrompt, kind: str, part: dict[str, Any]) -> bytes:
    if kind == _INPUT_IMAGE or kind.startswith("image") or "image_url" in part:  # engines take a part without a type, too
        prompt.images += 1
        url, tokens = _image(part)
        if url:
            return prompt.filled(xxhash.xxh3_128_digest(url), tokens * _BYTES_PER_TOKEN)
    elif kind in _FILES:
        size = _file_size(part)
        if size:
            tokens = min(size // _FILE_BYTES_PER_TOKEN, _MAX_FILE_TOKENS)
            return prompt.filled(_digest(without(part, MARKER)), tokens * _BYTES_PER_TOKEN)
        source = part.get("source")
        if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
            data: str = source["data"]
            return DIGEST + _digest(without(part, MARKER, "source")) + data.encode()
    elif kind == "refusal" and isinstance(part.get("refusal"), str):
        refusal: str = part["refusal"]
        return refusal.encode()
    return _opaque(prompt, part)


def _image(part: dict[str, Any]) -> tuple[bytes, int]:
    """The bytes that identify an image, b"" for an unknown form, and its tokens."""
    image, source = part.get("image_url"), part.get("source")
    if isinstance(image, dict) and not image.keys() - {"url", "detail"}:
        image = image.get("url")
    if isinstance(image, str) and not part.keys() - {"type", "image_url", "detail", MARKER, OPENAI_MARKER}:
        return image.encode(), image_tokens(image)
    if isinstance(source, dict):
        data, kind = source.get("data"), source.get("media_type")
        if source.get("type") == "base64" and isinstance(data, str) and isinstance(kind, str):
            return b"data:%b;base64,%b" % (kind.encode(), data.encode()), data_tokens(data)
        if source.get("type") == "url" and isinstance(url := source.get("url"), str):
            return url.encode(), image_tokens(url)
    return b"", 0


def _file_size(part: dict[str, Any]) -> int:
    """The characters of a file in base64; 0 if the part is no file."""
    inner = part.get("file")
    for holder, name in ((part, "file_data"), (inner, "file_data"), (part.get("source"), "data")):
        if isinstance(holder, dict) and isinstance(data := holder.get(name), str) and holder.get("type") != "text":
            return len(data)
    return 0


def _opaque(prompt: CanonicalPrompt, part: dict[str, Any]) -> bytes:
    data = to_json(without(part, MARKER) if MARKER in part else part)
    return prompt.filled(xxhash.xxh3_128_digest(data), min(len(data), _OPAQUE_TOKENS * _BYTES_PER_TOKEN))


def _digest(part: dict[str, Any]) -> bytes:
    return xxhash.xxh3_128_digest(to_json(part))
