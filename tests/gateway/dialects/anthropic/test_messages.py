"""Requests of Anthropic's Messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.anthropic.messages import Messages

BODY = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
OWN = {"name": "read", "input_schema": {"type": "object"}}
SERVER = {"type": "url", "url": "https://mcp.example.com", "name": "example"}


@pytest.mark.parametrize(
    ("fields", "countable"),
    [
        ({}, True),
        ({"tools": [OWN], "mcp_servers": []}, True),
        ({"tools": [OWN, {"type": "web_search_20250305", "name": "web_search"}]}, False),
        ({"mcp_servers": [SERVER]}, False),
        ({"mcp_servers": [SERVER], "tools": [OWN]}, False),
    ],
)
def test_the_usage_of_a_server_that_runs_tools_is_that_of_several_prompts(fields: dict[str, Any], countable: bool) -> None:
    assert Messages().parse(json.dumps(BODY | fields).encode()).countable is countable
