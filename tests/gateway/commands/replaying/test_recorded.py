"""`warmroute simulate` on a recording: measured beside simulated, what if, money."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.commands.cli import main
from router.simulation.recorded import FORMAT

Capture = pytest.CaptureFixture[str]
HEADER = {"format": FORMAT, "version": 1, "sample": 1.0, "policy": "least_loaded"}
FLEET = [{"replica": number, "pool": 1, "kv_tokens": 100_000} for number in (1, 2, 3)]


def made(*, conversations: int = 40, **header: Any) -> list[dict[str, Any]]:
    """Conversations of three turns over one head of 4 blocks, on replicas that compute 1,000 tokens a second, alone."""
    chance, rows, last = random.Random(1), list[dict[str, Any]](), 0
    for conversation in range(1, conversations + 1):
        now, tokens, end, end_blocks, before = 2.0 * conversation, 120 + chance.randrange(200), 0, 0, 0
        for turn in range(3):
            cached = before // 16 * 16 if turn else 64 * (conversation > 3)
            parent, new = (end or min(last, 4)), tokens // 16 - (min(last, 4) if not end else end_blocks)
            ttft, out = (tokens - cached) / 1000.0, 30
            row = {
                "t": now,
                "seconds": ttft + 29 / 50,
                "ttft": ttft,
                "in": tokens,
                "out": out,
                "cached": cached,
                "predicted": 0,
            }
            row |= {"units": 4 * tokens, "block": 64, "parent": parent, "new": new, "chain": conversation, "client": 1}
            rows.append({**row, "pool": 1, "replica": conversation % 3 + 1, "model": 1, "tenant": 1, "status": 200})
            last += new
            end, end_blocks, before = last, tokens // 16, tokens + out
            now, tokens = now + 5.0, tokens + out + 80
    return [{**HEADER, "fleet": FLEET, **header}, *rows, {"end": 100.0, "lost": 0}]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return written(tmp_path / "day.jsonl", made())


def printed(capsys: Capture, *arguments: str) -> list[str]:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Capture, *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_measured_and_simulated_stand_side_by_side(trace: str, capsys: Capture) -> None:
    fleet, speed, warm, head, measured, simulated = printed(capsys, trace)
    assert warm.startswith("the first 33 s are not in the numbers")
    assert fleet == "120 requests in 0.03 h; 3 replicas, 100,000 KV tokens each"
    assert speed.startswith("prefill 1,000 tokens/s, decode 50.0 tokens/s, 0 ms for each first token")
    assert head.split()[0] == "policy"
    assert measured.split()[:2] == ["measured", "120"]
    assert simulated.split()[:2] == ["least_loaded", "120"], "the gateway's policy"


@pytest.mark.parametrize(
    ("without", "flags", "said"),
    [
        (
            (),
            ("--warm-up", "500"),
            "all requests begin in the first 500 s, the warm-up, so nothing measured is left, and the rows",
        ),
        (("ttft",), (), "nothing measured: no request was streamed"),
        (("cached",), (), "nothing measured: no answer reports cached tokens"),
    ],
)
def test_where_nothing_was_measured_it_says_why(
    without: tuple[str, ...], flags: tuple[str, ...], said: str, tmp_path: Path, capsys: Capture
) -> None:
    header, *rows, last = made()
    kept = [{name: value for name, value in row.items() if name not in without} for row in rows]
    path = written(tmp_path / "day.jsonl", [header, *kept, last])
    *about, _, simulated = printed(capsys, path, "--runs", "1", "--prefill-rate", "1000", *flags)
    assert sum(line.startswith(said) for line in about) == 1
    assert not any("are not in the numbers" in line for line in about)
    assert simulated.split()[:2] == ["least_loaded", "120"]
    assert main(["simulate", path, "--runs", "1", *flags, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"warmroute: note: {said}")
    assert "measured" not in json.loads(out)


def test_it_is_simulated_as_it_was(trace: str, capsys: Capture) -> None:
    found = as_json(capsys, trace, "--policy", "cost", "--runs", "3")
    [one] = found["results"]
    assert one["hit_ratio"] == pytest.approx(found["measured"]["hit_ratio"], abs=0.05)
    assert one["ttft_mean_s"] == pytest.approx(found["measured"]["ttft_mean_s"], rel=0.4), "nobody queued in what was made up"
    assert len(one["replays"]) == 3
    assert found["fleet"]["prefill_rate"] == pytest.approx(1000.0)


def test_flags_come_before_what_was_recorded(trace: str, capsys: Capture) -> None:
    flags = "--replicas", "2", "--kv-tokens", "5000", "--prefill-rate", "500", "--decode-rate", "10"
    found = as_json(capsys, trace, *flags)
    fleet = found["fleet"]
    assert (fleet["replicas"], fleet["kv_tokens"], fleet["prefill_rate"], fleet["decode_rate"]) == (2, 5000, 500.0, 10.0)
    assert found["results"][0]["e2e_mean_s"] > 3.0


def test_what_if_is_a_row_and_a_sentence(trace: str, capsys: Capture) -> None:
    *_, base, one, other, said, also = printed(
        capsys, trace, "--what-if", "replicas=1,prefill=200", "--what-if", "policy=round_robin"
    )
    assert [row.split()[0] for row in (base, one, other)] == ["least_loaded", "replicas=1,prefill=200", "policy=round_robin"]
    assert said.startswith("with 1 replica and 200 tokens/s of prefill p90 TTFT would be ")
    assert also.startswith("with policy round_robin p90 TTFT would be ")
    rows = as_json(capsys, trace, "--what-if", "prefill=200")["results"]
    assert rows[1]["ttft_mean_s"] > 4 * rows[0]["ttft_mean_s"]
    assert rows[1]["what_if"] == "prefill=200"


def test_what_if_is_for_any_workload_and_does_not_change_the_load(capsys: Capture) -> None:
    chat = "gen:chat", "--replicas", "4", "--hours", "0.02", "--users", "20"
    base, fewer, faster = as_json(capsys, *chat, "--what-if", "replicas=2", "--what-if", "policy=random")["results"]
    assert (base["replicas"], fewer["replicas"], faster["policy"]) == (4, 2, "random")
    assert fewer["requests"] == pytest.approx(base["requests"], rel=0.1), "not half of the users"


def test_load_is_a_factor_on_the_conversations(trace: str, capsys: Capture) -> None:
    slow = as_json(capsys, trace, "--what-if", "speed=20,prefill=100", "--what-if", "prefill=100", "--runs", "1")["results"]
    assert slow[1]["ttft_mean_s"] > 1.5 * slow[2]["ttft_mean_s"]


def test_money(trace: str, capsys: Capture) -> None:
    prices = (
        "--price-input",
        "1",
        "--price-cached",
        "0",
        "--price-output",
        "10",
        "--gpu-hour",
        "2",
        "--runs",
        "1",
        "--warm-up",
        "0",
    )
    base, more = as_json(capsys, trace, *prices, "--what-if", "replicas=6")["results"]
    rows = made()[1:-1]
    output = sum(row["out"] for row in rows) * 10 / 1e6
    uncached = (1 - base["hit_ratio"]) * sum(row["in"] for row in rows) / 1e6
    assert base["tokens_usd"] == pytest.approx(output + uncached, rel=1e-6)
    assert base["replicas_usd"] == pytest.approx(3 * 2 * base["hours"])
    assert more["replicas_usd"] == pytest.approx(6 * 2 * more["hours"])
    lines = printed(capsys, trace, *prices, "--what-if", "replicas=6")
    assert lines[2].split()[-1] == "USD/h"
    assert "and an hour would cost " in lines[-1]


def test_one_pool_at_a_time(tmp_path: Path, capsys: Capture) -> None:
    rows = made()
    for row in rows[1:31]:
        row["pool"] = 2
    path = written(tmp_path / "a.jsonl", rows)
    assert "left out: 30 requests that failed, or of other pools than 1 (--pool)" in printed(capsys, path)
    assert printed(capsys, path, "--pool", "2")[0].startswith("30 requests")
    assert "no request of pool 7 (--pool); there are: 1, 2" in refused(capsys, path, "--pool", "7")


def test_what_is_missing_is_said(tmp_path: Path, capsys: Capture) -> None:
    rows = made(fleet=[], sample=0.5)
    rows[-1]["lost"] = 9
    for row in rows[1:-1]:
        row["ttft"] = None
    lines = "\n".join(printed(capsys, written(tmp_path / "a.jsonl", rows), "--runs", "1"))
    assert "(a guess, for the recording does not say: --kv-tokens)" in lines
    assert "the recording does not show the prefill rate: --prefill-rate" in lines
    assert "a sample of 0.5 of the conversations: each is replayed 2 times" in lines
    assert "the recording lacks 9 requests" in lines


def test_at_the_recorded_times_or_after_the_answers(trace: str, capsys: Capture) -> None:
    slow = trace, "--prefill-rate", "20", "--replicas", "1", "--runs", "1"
    [waiting], [anyway] = (as_json(capsys, *slow, *more)["results"] for more in ((), ("--open",)))
    assert anyway["ttft_mean_s"] > 1.2 * waiting["ttft_mean_s"]


def test_nothing_to_replay(tmp_path: Path, capsys: Capture) -> None:
    header, *rows, last = made()
    assert "it has no request" in refused(capsys, written(tmp_path / "a", [header, last]))
    failed = [{**row, "status": 503} for row in rows]
    assert "no request of pool 1 was answered" in refused(capsys, written(tmp_path / "b", [header, *failed]))
    assert "line 3: parent" in refused(capsys, written(tmp_path / "c", [header, rows[0], {**rows[1], "parent": 10**6}]))
    assert "version is 9" in refused(capsys, written(tmp_path / "d", [{**header, "version": 9}]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--what-if", "replicas=x"), "--what-if: replicas='x' is not a whole number"),
        (("--price-input", "-1"), "--price-input: -1.0 is not a price"),
        (("--gpu-hour", "nan"), "--gpu-hour: nan is not a price"),
        (("--warm-up", "-1"), "--warm-up: -1.0 is not a number of seconds"),
        (("--warm-up", "inf"), "--warm-up: inf is not"),
        (("--runs", "0"), "--runs: 0"),
        (("--runs", "1001"), "--runs: 1001 is more than 1000"),
        (("--engine-block", "0"), "--engine-block: 0"),
    ],
)
def test_wrong_values_are_refused(trace: str, flags: tuple[str, str], message: str, capsys: Capture) -> None:
    assert message in refused(capsys, trace, *flags)


def test_a_seed_decides_all_chance(trace: str, capsys: Capture) -> None:
    one, again, other = (as_json(capsys, trace, "--seed", seed, "--prefill-rate", "300") for seed in ("1", "1", "9"))
    assert one == again != other
