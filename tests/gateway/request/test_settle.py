"""The end of a request: what its observers make of it."""

from __future__ import annotations

import json
import logging
from random import Random

from gateway.request.observers.access_log import AccessLog
from gateway.request.record import SettledRequest
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.request_log import RequestLog


def test_durations_are_logged_in_whole_microseconds() -> None:
    written = bytearray()

    def sink(data: memoryview) -> int:
        written.extend(data)
        return len(data)

    chance, output = Random(1), LogOutput(sink)
    times = [(0.0, 0.0), (4e-7, 6e-7), (0.1, 0.123457), *((chance.expovariate(1), chance.uniform(0, 1e6)) for _ in range(500))]
    log = AccessLog(RequestLog(output, logging.INFO))
    for first_byte, ended in times:
        request = SettledRequest("wr-1", "/v1/chat/completions", 0.0)
        request.answer.first_token, request.ended = first_byte, ended
        log(request)
    assert output.flush()
    output.close()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [(line["ttft_s"], line["seconds"]) for line in lines] == [
        (round(first_byte, 6), round(ended, 6)) for first_byte, ended in times
    ]
