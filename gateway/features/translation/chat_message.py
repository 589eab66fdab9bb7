"""A chat message as some engines write it: `content` as a list of parts, where most have a text. Pure."""

from __future__ import annotations

from typing import Any


def in_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message, or a delta, with texts in the place of parts. O(parts).

    `text` goes to `content`, `thinking` (of Mistral, with parts of its own) to `reasoning_content`. Parts of other types, as
    references, have no words in the other dialects: left out.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    said, thought = list[str](), list[str]()
    for part in content:
        if isinstance(part, dict):
            said += _texts(part, "text")
            inner = part.get("thinking")
            if isinstance(inner, list):
                for each in inner:
                    if isinstance(each, dict):
                        thought += _texts(each, "text")
            else:
                thought += _texts(part, "thinking")
    written = {**message, "content": "".join(said)}
    if thought:
        written["reasoning_content"] = "".join(thought)
    return written


def _texts(part: dict[str, Any], name: str) -> list[str]:
    text = part.get(name)
    return [text] if isinstance(text, str) else []
