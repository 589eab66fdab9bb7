"""The request of a step: headers of the client's request, but for those about its own body."""

from __future__ import annotations

from typing import cast

import pytest

from gateway.features.workflows.running.messages import StepContext
from gateway.features.workflows.running.step_request import StepReply, StepRequest
from gateway.request.rights import Rights
from tests.support.compiled import uncompiled
from tests.support.in_memory import BytesRequest

pytestmark = uncompiled  # its request is a subclass of a compiled class


def request_of(**headers: str) -> StepRequest:
    asked = BytesRequest(b"", "/v1/workflows/runs", **headers)
    reply, context = cast(StepReply, asked.answer), StepContext({}, defined=False)
    return StepRequest(asked, "run_1.a", "/v1/chat/completions", asked.lease, reply, context)


def test_headers_about_the_body_of_the_client_are_not_the_steps() -> None:
    request = request_of(Prompt_Log="name", Idempotency_Key="k", X_Tenant_Id="acme")
    found = [request.headers.get(name) for name in ("Prompt-Log", "Idempotency-Key", "X-Tenant-Id", "X-Request-Id")]
    assert found == [None, None, "acme", "run_1.a"]
    assert request.upstream_headers() == b"X-Tenant-Id: acme\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [
        (None, None, "-1"),
        ("5", None, "4"),
        (None, 50, "49"),
        (None, -50, "-51"),
        ("10", 5, "4"),
        ("3", 5, "2"),
        ("-100", None, "-100"),
        ("high", None, "high"),
    ],
)
def test_the_priority_of_a_step_that_may_be_killed(given: str | None, most: int | None, expected: str) -> None:
    request = request_of(**({} if given is None else {"X_Priority": given}))
    rights = None
    if most is not None:
        rights = Rights()
        rights.priority = most
    request.yield_to_certain(rights)
    assert request.headers.get("X-Priority") == expected
