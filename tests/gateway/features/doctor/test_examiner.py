"""An examination in a process of its own: its report, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from gateway.dialects.prompt.outline import Outliner
from gateway.errors import GatewayError
from gateway.features.doctor.examiner import PART, Examiner
from gateway.features.doctor.watch import DoctorWatch, WatchedRequests
from tests.gateway.conftest import eventually
from tests.gateway.features.doctor.test_watch import seen
from tests.support.configs import load

PRICES = {"*": [{"input": 1.0, "output": 2.0, "tiers": [{"above": 1000, "input": 2.0, "output": 4.0}]}]}
SAYS_ITS_PID = "import os, pathlib, sys, time; pathlib.Path({!r}).write_text(str(os.getpid())); {}"


def watched(requests: int, keys: int = 8) -> WatchedRequests:
    watch = DoctorWatch(Outliner())
    watch.begin(0.0)
    for number in range(requests):
        watch.record(seen(number, watch.outliner, keys=bytes(keys)))
    return watch.watched()


def examiner(path: Path, then: str) -> Examiner:
    """Its process leaves its pid in a file."""
    return Examiner(boot=SAYS_ITS_PID.format(str(path), then))


async def test_it_examines_what_several_workers_have_seen() -> None:
    prices = load(None, {"prices": PRICES, "pools": [{"replicas": ["http://a:1"]}]}, env={}).prices
    made = Examiner()
    report = json.loads(await made.examine({"watched_s": 1.0}, prices, [watched(3), watched(4, keys=PART)], 1.8e9))
    assert (report["watched_s"], report["requests"], report["lost_usd"]) == (1.0, 7, 0.0)
    assert made.started == 1


async def test_without_records_there_is_no_process() -> None:
    made = Examiner()
    report = json.loads(
        await made.examine({"watched_s": None}, {}, [WatchedRequests(1.0, []), WatchedRequests(None, [])], 1.8e9)
    )
    assert (report["watched_s"], report["requests"], made.started) == (None, 0, 0)


async def test_one_that_takes_too_long_is_ended() -> None:
    with pytest.raises(GatewayError, match="too long") as caught:
        await Examiner(within_s=0.5, boot="import time; time.sleep(600)").examine({}, {}, [watched(1)], 1.8e9)
    assert caught.value.status == 503


async def test_nothing_is_left_of_a_cancelled_one(tmp_path: Path) -> None:
    asked = asyncio.ensure_future(examiner(tmp_path / "pid", "time.sleep(600)").examine({}, {}, [watched(1)], 1.8e9))
    await eventually(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("sys.stdin.buffer.read(); sys.exit(1)", 500),
        ("os.kill(os.getpid(), 9)", 503),
        ("sys.stdin.buffer.read(); sys.stdout.buffer.write(bytes(65 << 20))", 503),
    ],
    ids=["a bug", "killed", "a flood"],
)
async def test_one_that_fails_is_an_error(tmp_path: Path, then: str, status: int) -> None:
    with pytest.raises(GatewayError) as caught:
        await examiner(tmp_path / "pid", then).examine({}, {}, [watched(1)], 1.8e9)
    assert caught.value.status == status
