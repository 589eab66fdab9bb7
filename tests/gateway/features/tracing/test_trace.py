"""What is noted of a request that tries many replicas is bounded, and no two of its spans have one id."""

from __future__ import annotations

from gateway.features.tracing.trace import MAX_ATTEMPTS, Trace
from gateway.request.notes import ADMIT


def test_attempts_are_bounded_and_the_last_one_is_kept() -> None:
    trace, parents = Trace("a" * 32, "", 1, "POST", 0), set[bytes]()
    for number in range(5000):
        parents.add(trace.attempt(f"r{number}", "http://r", "vllm", float(number)))
        trace.failed("refused", "", number + 0.5)
    assert len(parents) == trace.tried == 5000
    assert len(trace.attempts) == MAX_ATTEMPTS
    assert [one.replica for one in trace.attempts] == [*(f"r{number}" for number in range(MAX_ATTEMPTS - 1)), "r4999"]
    assert trace.attempts[-1].ended == 4999.5
    for number in range(3000):
        trace.enter(ADMIT, float(number))
    ids = [trace.span_id, *(one.span_id for one in trace.attempts), *(trace.phase_id(number) for number in range(3000))]
    assert len(set(ids)) == len(ids)
    assert repr(trace).endswith("5000 attempts>")
