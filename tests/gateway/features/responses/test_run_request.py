"""The request of a background run is made without parsing, of its client's request: it is what its body says."""

from __future__ import annotations

import orjson
import pytest

from gateway.admission.memory import Budget
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.json_edits import read_object
from gateway.dialects.responses.responses import Responses
from gateway.features.histories.history import History
from gateway.features.responses.recall import run_request

TEXT = {"type": "input_text", "text": "hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def values(api: ApiRequest) -> dict[str, object]:
    found = {name: getattr(api, name) for name in dir(api) if not name.startswith("_")}
    return {name: value for name, value in found.items() if not callable(value)}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True, "store": True, "truncation": "auto", "prompt_cache_key": "session", "previous_response_id": "resp_1"},
        {"lora_path": "adapter", "priority": 5},
        {"input": [{"role": "user", "content": [TEXT, IMAGE]}, {"type": "item_reference", "id": "msg_1"}]},
    ],
)
async def test_it_is_what_its_body_says(more: dict[str, object]) -> None:
    raw = orjson.dumps({"model": "m", "input": "hello", "background": True, **more})
    lease = Budget(1 << 20).lease("192.0.2.1")
    made = await run_request(Responses().parse(raw), History(read_object(raw)), lease)
    assert orjson.loads(made.body) == {**orjson.loads(raw), "background": False, "stream": True}
    assert values(made) == values(Responses().parse(made.body))
    assert lease.held == len(made.body)
    lease.close()
