"""Breakpoints that Anthropic's API refuses are refused, all others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.messages import CountTokens, Messages
from gateway.dialects.prompt.marks import MAX_MARKS
from gateway.errors import GatewayError

SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}


def refusal(body: dict[str, Any]) -> GatewayError | None:
    try:
        Messages().parse(json.dumps(body).encode())
    except GatewayError as error:
        return error
    return None


def text(marker: Any = None, of: str = "x") -> dict[str, Any]:
    return {"type": "text", "text": of, "cache_control": marker}


def asking(*content: Any, **body: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(content)}], **body}


def result(*content: Any, marker: Any = None) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(content), "cache_control": marker}


@pytest.mark.parametrize("kind", [{}, [], {"text": 1}, 5, None, True])
def test_a_block_of_a_type_that_is_no_name_is_no_failure(kind: Any) -> None:
    found = refusal(asking({"type": kind, "text": "x", "cache_control": SHORT}))
    assert found is None or found.status == 400


TOOL = {"name": "read", "input_schema": {"type": "object"}, "cache_control": LONG}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (asking(*[text(SHORT)] * 5), "cache_control", "5 breakpoints are set"),
        (asking(*[text(SHORT)] * 4, text(), cache_control=SHORT), "cache_control", "5 breakpoints are set"),
        (
            {
                "model": "m",
                "system": [text(SHORT)] * 4,
                "messages": [{"role": "user", "content": "the last block, unmarked"}],
                "cache_control": SHORT,
            },
            "cache_control",
            "5 breakpoints are set",
        ),
        (
            asking(result(text(LONG)), text(LONG), text(SHORT), tools=[TOOL], system=[text(LONG)]),
            "cache_control",
            "5 breakpoints are set",
        ),
        (asking(text(SHORT, "")), "messages[0].content[0].cache_control", "an empty text"),
        (asking(text(), result(text(SHORT, ""))), "messages[0].content[1].content[0].cache_control", "an empty text"),
        (
            asking({"type": "thinking", "thinking": "x", "signature": "y", "cache_control": SHORT}),
            "messages[0].content[0].cache_control",
            "of type 'thinking'",
        ),
        (asking(text(LONG), system=[text(SHORT)]), "messages[0].content[0].cache_control", '"1h" must not stand after'),
        (asking(text(SHORT), text(), cache_control=LONG), "cache_control", '"1h" must not stand after'),
        (asking(text({"type": "forever"})), "messages[0].content[0].cache_control", '"type": "ephemeral"'),
        (asking(text("ephemeral")), "messages[0].content[0].cache_control", '"type": "ephemeral"'),
        (asking(text(), system=[text({**SHORT, "ttl": "2h"})]), "system[0].cache_control.ttl", '"5m" or "1h"'),
        (asking(text(), system=[text({**SHORT, "ttl": ["5m"]})]), "system[0].cache_control.ttl", '"5m" or "1h"'),
        (asking(text(), cache_control=5), "cache_control", '"type": "ephemeral"'),
    ],
)
def test_a_breakpoint_that_breaks_a_rule_is_refused(body: dict[str, Any], param: str, message: str) -> None:
    error = refusal(body)
    assert error is not None
    assert (error.status, error.param) == (400, param)
    assert message in error.message
    with pytest.raises(GatewayError):
        CountTokens().parse(json.dumps(body).encode())


def test_all_that_may_be_marked() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}, "cache_control": SHORT}
    assert refusal(asking(result(text(LONG)), image, text(SHORT), tools=[TOOL])) is None
    assert refusal(asking(text(), *[text(LONG)] * 2, *[text(SHORT)] * 2, system="s")) is None
    assert refusal(asking(result(marker=SHORT), text(None, ""), cache_control=None)) is None
    assert refusal(asking(*[text(SHORT)] * 4, cache_control=SHORT)) is None, "the last block is marked anyway"


markers = st.none() | st.sampled_from([SHORT, LONG, {"type": "ephemeral", "ttl": "5m"}])


@given(st.lists(markers, max_size=3), st.lists(markers, max_size=3), st.lists(markers, min_size=1, max_size=4), markers)
def test_the_rules_by_counting(tools: list[Any], system: list[Any], said: list[Any], last: Any) -> None:
    body = asking(
        *map(text, said),
        tools=[{**TOOL, "cache_control": marker} for marker in tools],
        system=[text(marker) for marker in system],
        cache_control=last,
    )
    ttls = [marker.get("ttl", "5m") for marker in [*tools, *system, *said] if marker]
    count = len(ttls) + bool(last and not said[-1])
    ttls += [last.get("ttl", "5m")] if last else []
    wrong = count > MAX_MARKS or ttls != sorted(ttls)  # "1h" comes before "5m" in the alphabet, too
    assert (refusal(body) is not None) == wrong
