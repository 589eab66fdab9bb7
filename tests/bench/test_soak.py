"""The soak: its law finds what is wrong, and a short one holds it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench.measure.cpu import cores
from bench.soak import report
from bench.soak.__main__ import main, options_of
from bench.soak.attacks import EXPECTED, Line, attacks, chat, post, repeated
from bench.soak.clients import MAX_ERROR_TEXTS, Tally
from bench.soak.fleet import Setup, fleet
from bench.soak.health import OK, Answer, ask, schedule
from bench.soak.law import BOOKINGS, BYSTANDERS, FAILING, Limits, Outcome, State, violations
from bench.soak.log import MAX_LINES, counted
from bench.soak.watch import ROWS, Sample, Watch
from tests.chaos.hostile import FAULTS, POISONS, poison_of
from tests.support.paths import ROOT

LIMITS = Limits(health_s=1.0, grow_mb=100.0, peak_mb=356.0, answered=0.99)
SOCKETS = Counter({"listening": 1, "files": 11, "replicas": 2})
REST = State({**dict.fromkeys(BOOKINGS, 0.0), "inflight_bytes": 132.0, "client_connections": 1.0}, SOCKETS, 60.0)


def tally(**fates: int) -> Tally:
    return Tally(Counter(fates))


GOOD = Outcome(
    tallies={FAILING: tally(answered=198, cut=1, refused=1), BYSTANDERS: tally(answered=100)},
    attacks={"half closed": Counter({"closed": 99, "502": 1}), "json bomb": Counter({"413": 10})},
    start=REST,
    end=replace(REST, rss_mb=159.0, sockets=SOCKETS + Counter(replicas=8)),
    longest_health_s=0.2,
    health_answers=1000,
    health_failures=0,
    peak_mb=300.0,
    workers=1,
    replicas=5,
    clients=20,
    attackers=4,
    workers_killed=0,
    requests_before=50,
    requests_after=360,
    exit_status=0,
    log={"tracebacks": 0, "requests": 360, "messages": {"warning: replica down": 7}},
)


def test_a_good_soak_breaks_nothing() -> None:
    assert list(violations(GOOD, LIMITS)) == []
    killed = replace(
        GOOD,
        workers_killed=1,
        tallies={**GOOD.tallies, FAILING: tally(answered=9, lost=20)},
        attacks={"large body": Counter({"200": 9, "closed": 2}), "pipelining": Counter({"ConnectionRefusedError": 2})},
        log={"requests": 3, "messages": {"error: worker ended": 1}},
    )
    assert list(violations(killed, LIMITS)) == []


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (
            {"tallies": {**GOOD.tallies, FAILING: tally(answered=99, lost=1)}},
            "1 requests of clients of the pool .* lost, 0 may be",
        ),
        ({"tallies": {**GOOD.tallies, FAILING: tally(answered=99, unreached=1)}}, "1 connections .* refused"),
        ({"tallies": {**GOOD.tallies, FAILING: tally(answered=99, wrong=1)}}, "1 answers to clients of the pool .* were wrong"),
        ({"tallies": {**GOOD.tallies, FAILING: tally(answered=1, refused=99)}}, "1 of 100 requests of clients of the pool"),
        ({"tallies": {**GOOD.tallies, FAILING: tally()}}, "0 of 0 requests of clients of the pool"),
        ({"tallies": {**GOOD.tallies, FAILING: Tally(Counter(answered=9), open=1)}}, "1 requests .* never ended"),
        ({"tallies": {**GOOD.tallies, BYSTANDERS: tally(answered=98, refused=2)}}, "98 of 100 requests of bystanders"),
        ({"attacks": {"json bomb": Counter(silent=1)}}, r"1 hostile requests \(json bomb\) were never answered"),
        ({"attacks": {"large body": Counter(closed=1)}}, r"1 of 1 hostile requests \(large body\) came to {'closed': 1}"),
        ({"attacks": {"large body": Counter({"200": 98, "500": 2})}}, r"2 of 100 hostile requests \(large body\) came to"),
        ({"attacks": {"crowd": Counter(ConnectionRefusedError=9)}}, r"9 of 9 hostile requests \(crowd\) came to"),
        (
            {"workers_killed": 1, "attacks": {"large body": Counter(closed=5)}},
            r"5 of 5 hostile requests \(large body\) came to",
        ),
        ({"end": replace(REST, bookings={**REST.bookings, "pool_waiting": 1.0})}, "pool_waiting is 1 at the end, 0 at most"),
        (
            {"end": replace(REST, bookings={**REST.bookings, "inflight_bytes": 133.0})},
            "inflight_bytes is 133 at the end, 132 at most",
        ),
        ({"start": replace(REST, bookings={**REST.bookings, "inflight_bytes": 257.0})}, "is 257 at the start, 256 at most"),
        (
            {"end": replace(REST, bookings={**REST.bookings, "client_connections": 2.0})},
            "client_connections is 2 at the end, 1 at most",
        ),
        ({"end": replace(REST, sockets=SOCKETS + Counter(files=5))}, "open files: 16 at the end, 14 may be"),
        ({"end": replace(REST, sockets=SOCKETS + Counter(clients=1))}, "open clients: 1 at the end, none may be"),
        ({"start": replace(REST, sockets=SOCKETS + Counter(clients=1))}, "open clients: 1 at the start, none may be"),
        ({"start": replace(REST, bookings={**REST.bookings, "pool_waiting": 1.0})}, "pool_waiting is 1 at the start"),
        ({"end": replace(REST, sockets=SOCKETS + Counter(replicas=9))}, "open replicas: 11 at the end, 10 may be"),
        ({"end": replace(REST, rss_mb=161.0)}, "memory is 161 MB at the end, 60 MB at the start"),
        ({"longest_health_s": 1.5}, "/health was not answered for 1.50 s, 1 s at most$"),
        (
            {"longest_health_s": 3.2, "slowest": Answer(3.2, 0.004, 3.19, OK)},
            "for 3.20 s, 1 s at most; of these its main thread waited 3.19 s for a CPU that others had, and ran 0.00 s$",
        ),
        ({"longest_health_s": 9.0, "slowest": Answer(3.2, 0.004, 3.19, OK)}, "for 9.00 s, 1 s at most$"),
        ({"longest_health_s": 3.2, "slowest": Answer(3.2, 0.0, 0.0, OK)}, "for 3.20 s, 1 s at most$"),
        ({"longest_health_s": 3.2, "slowest": Answer(3.2, 0.004, 3.19, OK), "workers": 2}, "for 3.20 s, 1 s at most$"),
        ({"health_answers": 0}, "/health was never answered"),
        ({"health_failures": 1}, "1 questions for /health were not answered with 200, 0 may be"),
        ({"end": replace(REST, sockets=SOCKETS + Counter(closed=1))}, "open closed: 1 at the end, none may be"),
        ({"peak_mb": 357.0}, "peak memory was 357 MB, 356 MB at most"),
        (
            {"requests_after": 349, "log": {"requests": 349}},
            "counted 299 requests, well-behaved clients alone sent 300",
        ),
        ({"log": {"requests": 359}}, "counted 360 requests, and logged 359"),
        ({"exit_status": -9}, "exit status is -9"),
        ({"log": {"requests": 360, "tracebacks": 2}}, "2 tracebacks in the log"),
        ({"log": {"requests": 360, "unreadable": 3}}, "3 log lines that are not JSON"),
        ({"log": {"requests": 360, "messages": {"error: oops": 4}}}, "errors in the log: {'error: oops': 4}"),
        ({"log": {"requests": 360, "messages": {"error: worker ended": 1}}}, "1 workers ended, 0 were killed"),
    ],
)
def test_whatever_is_wrong_breaks_the_law(change: dict[str, object], pattern: str) -> None:
    (sentence,) = violations(replace(GOOD, **change), LIMITS)  # type: ignore[arg-type]
    assert re.search(pattern, sentence), sentence


def test_a_tally_is_bounded_and_knows_its_percentiles() -> None:
    one = Tally()
    for number in range(1000):
        one.count("answered" if number % 2 else "refused", f"why {number}", number / 1000)
    assert (one.sent, one.fates["answered"], len(one.reasons)) == (1000, 500, MAX_ERROR_TEXTS)
    assert one.percentile(0.5) == pytest.approx(0.5, abs=0.01)
    assert Tally().percentile(0.99) == 0


def test_the_log_is_counted_and_only_its_beginning_is_kept() -> None:
    lines = [json.dumps({"level": "info", "message": "request"}).encode() + b"\n"] * 9
    lines += [json.dumps({"level": "error", "message": "oops", "traceback": "..."}).encode() + b"\n"] * (MAX_LINES + 7)
    kept = io.BytesIO()
    counts = counted([*lines, b"not json\n", b"[]\n"], kept)
    assert (counts["requests"], counts["tracebacks"], counts["unreadable"]) == (9, MAX_LINES + 7, 2)
    assert counts["messages"]["error: oops"] == MAX_LINES + 7
    assert kept.getvalue().count(b"\n") == MAX_LINES


def test_every_kind_of_attack_has_a_name_of_its_own() -> None:
    names = [name for name, _ in attacks()]
    assert len(set(names)) == len(names) == 16 + len(POISONS)
    assert set(names) == set(EXPECTED), "and the law knows what it is to come to"
    assert not {"answers_429"} & set(FAULTS), "the chaos tests' failures stay those that a good gateway hides"


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2], ids=["none", "two"])
@pytest.mark.parametrize("apart", [False, True])
async def test_an_interim_answer_is_none(interim: bytes, apart: bool) -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    final = b"HTTP/1.1 404 Not Found\r\n\r\n"
    with theirs, contextlib.closing(writer):
        theirs.sendall(interim + (b"" if apart else final))
        if apart:
            asyncio.get_running_loop().call_later(0.1, theirs.sendall, final)
        assert await Line(reader, writer, Counter()).ends() == "404"


def test_a_poisoned_prompt_names_its_poison() -> None:
    for name, poison in POISONS.items():
        assert poison_of(chat("m", f"poison:{name} abc")) is poison
    assert poison_of(chat("m", "poison:unheard-of abc")) is None
    assert poison_of(b"{}") is None


def test_requests_and_bombs_are_what_they_should_be() -> None:
    head, _, body = post(b"{}", "X: y").partition(b"\r\n\r\n")
    assert (body, b"Content-Length: 2" in head, head.endswith(b"X: y")) == (b"{}", True, True)
    bomb = repeated(b"[{}", b",{}", b"]", 3 << 20)
    assert len(bomb) < 50_000


def test_rows_are_the_worst_of_their_time() -> None:
    chance = random.Random(1)
    watch = Watch(stage=None)  # type: ignore[arg-type]
    watch.samples = [Sample(float(at), chance.random(), at % 7, chance.random()) for at in range(107)]
    rows = watch.rows()
    assert len(rows) <= ROWS
    assert max(row.rss_mb for row in rows) == max(sample.rss_mb for sample in watch.samples)
    assert max(row.health_s for row in rows) == watch.longest_health_s
    assert rows[-1].second == 106


def test_health_is_asked_from_a_process_of_its_own() -> None:
    assert Answer.of(Answer(0.25, 0.001, 0.2, "503").line()) == Answer(0.25, 0.001, 0.2, "503")
    ran, ready = schedule(os.getpid())
    assert ran > 0 <= ready, "this process has run"
    assert schedule(2**22 + 1) == (0.0, 0.0), "there is no such process"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with ThreadPoolExecutor() as pool:
            for reply, what in ((b"HTTP/1.1 200 OK\r\n\r\n", OK), (b"HTTP/1.1 503 No\r\n\r\n", "503"), (b"", "NoAnswer")):
                asked = pool.submit(ask, port)
                client, _ = listener.accept()
                with client:
                    assert client.recv(4096).startswith(b"GET /health HTTP/1.1\r\n")
                    client.sendall(reply)
                assert asked.result() == what
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        assert ask(nobody_listens.getsockname()[1]) == "ConnectionRefusedError"


async def test_a_gateway_of_one_worker_has_a_core_of_its_own(tmp_path: Path) -> None:
    own, others = cores()
    async with fleet(tmp_path, Setup(ROOT, workers=1, budget_mb=64), seed=1) as running:
        assert os.sched_getaffinity(running.gateway.process.pid) == own
        replicas = [replica.child.process.pid for replica in running.stage.replicas]
        assert [os.sched_getaffinity(pid) for pid in replicas] == [others] * len(replicas)
        assert os.sched_getaffinity(0) == others, "the load, too"
    assert os.sched_getaffinity(0) == own | others


def test_the_page_states_what_is_broken() -> None:
    watch = Watch(stage=None)  # type: ignore[arg-type]
    good = report.page(["made"], GOOD, watch, LIMITS, Counter(kills=3), Counter(sent=5_000_000), [])
    assert "**The law holds:**" in good
    assert "at least 99% of each kind came to what it is to come to" in good
    assert "| half closed | 100 | closed: 99, 502: 1 |" in good
    bad = report.page(["made"], GOOD, watch, LIMITS, Counter(), Counter(), ["one thing", "another"])
    assert "**The law is broken:**\n\n- one thing\n- another\n" in bad


@pytest.mark.parametrize(
    ("minutes", "workers", "report"),
    [
        ("0.5", 1, "build/soak.md"),
        ("29", 2, "build/soak-2-workers.md"),
        ("30", 1, "bench/reports/soak.md"),
        ("60", 2, "bench/reports/soak-2-workers.md"),
    ],
)
def test_a_short_run_does_not_overwrite_the_report(minutes: str, workers: int, report: str) -> None:
    command = ["make", "--dry-run", "soak", f"MINUTES={minutes}", f"WORKERS={workers}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.split("--out ")[1].split()[0] == report


def test_where_the_report_goes_is_seen_to_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "soak.md"
    assert options_of(["--out", str(out)]).out == out
    out.write_text("the last report", "utf-8")
    assert options_of(["--out", str(out)]).out.read_text("utf-8") == "the last report", "until there is another one"
    with pytest.raises(SystemExit):
        options_of(["--out", str(out.parent)])
    assert "--out: no report can be written there" in capsys.readouterr().err


def test_without_pytest_the_error_has_a_remedy() -> None:
    """As `python -m bench.soak`, where pytest is not installed."""
    without = "import sys, runpy; sys.modules['pytest'] = None; runpy.run_module('bench.soak', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "bench.soak needs pytest. Run `make install` first, then .venv/bin/python.\n"


def test_a_short_soak_holds_the_law(tmp_path: Path) -> None:
    """All kinds of trouble and hostile clients for 20 s; the limits in time are those of a machine that is busy."""
    out = tmp_path / "soak.md"
    options = [
        "--minutes",
        "0.33",
        "--workers",
        "2",
        "--clients",
        "6",
        "--every",
        "1",
        "--bomb-mb",
        "4",
        "--health-ms",
        "20000",
    ]
    status = main([*options, "--out", str(out)])
    text = out.read_text("utf-8")
    assert (status, "**The law holds:**" in text) == (0, True), text
