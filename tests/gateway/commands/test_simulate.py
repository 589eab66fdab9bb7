"""`warmroute simulate` as a user runs it."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from gateway.commands.cli import main
from gateway.commands.simulate import NAMES
from router.simulation.generators import GENERATORS

KEYS = ["policy", "replicas", "kv_tokens", "requests", "hit_ratio"]
KEYS += ["ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s", "load_skew", "gateways", "sharing_delay_s"]
CHAT = [
    {
        "timestamp": 3000 * turn,
        "input_length": 1024 + 512 * turn,
        "output_length": 50,
        "hash_ids": [user, *range(100, 102 + turn)],
    }
    for turn in range(4)
    for user in range(5)
]
AGENTS = [
    {
        "id": f"s{number}",
        "block_size": 64,
        "tool_tokens": 640,
        "system_tokens": 64,
        "requests": [
            {"in": 6400, "out": 50, "think_time": 0.0, "keep": 0, "new": [[1, 100]]},
            {"in": 6464, "out": 50, "think_time": 2.0, "keep": 100, "new": [[101, 1]]},
        ],
    }
    for number in range(20)
]


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def chat(tmp_path: Path) -> str:
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(gzip.compress(lines(CHAT), mtime=0))
    return str(path)


@pytest.fixture
def coding(tmp_path: Path) -> str:
    path = tmp_path / "agents.jsonl"
    path.write_bytes(lines(AGENTS))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that it prints."""
    assert main(["simulate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("warmroute: ")
    assert err.count("\n") == 1
    return err


def results(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["simulate", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "progress is for terminals"
    found = json.loads(out)
    assert list(found) == ["results"]
    rows: list[dict[str, Any]] = found["results"]
    return rows


def test_a_table_has_a_row_for_each_policy(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", chat, "--policy", "cost,round_robin,pooled,infinite"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["policy", "requests", "hits", "TTFT", "mean", "p50", "p90", "p99", "e2e", "mean", "skew"]
    assert [row.split()[:2] for row in rows] == [[name, "20"] for name in ("cost", "round_robin", "pooled", "infinite")]
    assert len({len(row) for row in (head, *rows)}) == 1, "columns are aligned"


def test_json_has_exactly_these_keys(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    [cost, infinite] = results(capsys, chat, "--policy", "cost,infinite", "--replicas", "3", "--kv-tokens", "5000")
    assert list(cost) == list(infinite) == KEYS
    assert (cost["policy"], cost["replicas"], cost["kv_tokens"], cost["requests"]) == ("cost", 3, 5000, 20)
    assert 0 <= cost["hit_ratio"] <= infinite["hit_ratio"] < 1


def test_every_policy_runs_on_the_agents(coding: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["cost", "least_loaded", "round_robin", "random", "power_of_two", "sticky", "longest_prefix"]
    names += ["sglang", "dynamo", "llm_d", "lmetric", "session", "pooled", "infinite"]
    assert sorted(names) == sorted(NAMES)
    found = results(capsys, coding, "--policy", ",".join(names), "--replicas", "2", "--users", "2")
    assert [one["policy"] for one in found] == names
    assert {one["requests"] for one in found} == {40}
    assert found[0]["hit_ratio"] > found[2]["hit_ratio"]


def test_several_gateways_find_what_they_tell_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    chat = "gen:chat", "--hours", "0.05", "--users", "50", "--replicas", "4"
    [one] = results(capsys, *chat)
    [shared] = results(capsys, *chat, "--gateways", "4")
    [late] = results(capsys, *chat, "--gateways", "4", "--sharing-delay", "20")
    [apart] = results(capsys, *chat, "--gateways", "4", "--sharing-delay", "inf")
    assert shared["hit_ratio"] > one["hit_ratio"] - 0.02
    assert apart["hit_ratio"] < late["hit_ratio"] < shared["hit_ratio"]
    assert apart["ttft_mean_s"] > shared["ttft_mean_s"]


def test_the_gateways_and_their_delay_are_in_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    chat = "gen:chat", "--hours", "0.01", "--users", "4", "--replicas", "2", "--policy", "cost,pooled"

    def shown(*arguments: str) -> list[tuple[int, float | None]]:
        return [(each["gateways"], each["sharing_delay_s"]) for each in results(capsys, *chat, *arguments)]

    assert shown() == [(1, None), (1, None)]
    assert shown("--gateways", "2", "--sharing-delay", "0.1") == [(2, 0.1), (1, None)]
    assert shown("--gateways", "2", "--sharing-delay", "inf") == [(2, None), (1, None)]
    assert shown("--gateways", "9")[0] == (9, pytest.approx(0.04))
    assert shown("--gateways", "33")[0] == (33, pytest.approx(0.1)), "many write and read more rarely"
    for delay, text in (("0.1", "sharing delay 0.1 s"), ("inf", "not shared")):
        assert main(["simulate", *chat, "--gateways", "2", "--sharing-delay", delay]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"gateways: 2, {text}"


def test_the_numbers_of_the_fleet_matter(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    [plain], [slower] = (results(capsys, chat, *more) for more in ((), ("--prefill-rate", "100", "--decode-rate", "5")))
    [compressed], [alone] = (
        results(capsys, chat, *more) for more in (("--speed", "50"), ("--batch-limit", "1", "--replicas", "1"))
    )
    assert slower["ttft_mean_s"] > 50 * plain["ttft_mean_s"]
    assert slower["e2e_mean_s"] - slower["ttft_mean_s"] == pytest.approx(10.0)
    assert compressed["ttft_mean_s"] > plain["ttft_mean_s"]
    assert alone["ttft_mean_s"] > 2 * plain["ttft_mean_s"]


def test_a_seed_decides_all_chance(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, again, other = (results(capsys, chat, "--policy", "random", "--seed", seed) for seed in ("-3", "-3", "4"))
    assert one == again != other


# -- made-up workloads


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--replicas", "2", "--hours", "0.005", "--policy", "cost,sticky,pooled"]
    found = results(capsys, f"gen:{name}", *small)
    assert [list(one) for one in found] == [KEYS] * 3
    assert found[0]["requests"] > 10
    assert all(0 <= one["hit_ratio"] < 1 and one["ttft_mean_s"] > 0 for one in found)


def test_a_larger_fleet_gets_more_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    def requests(name: str, *more: str) -> int:
        [only] = results(capsys, f"gen:{name}", "--policy", "pooled", "--hours", "0.01", *more)
        return int(only["requests"])

    for name in ("hot_prefix", "chat"):
        assert requests(name, "--replicas", "8") == pytest.approx(4 * requests(name, "--replicas", "2"), rel=0.2)
    assert requests("hot_prefix", "--speed", "0.5") == pytest.approx(0.5 * requests("hot_prefix"), rel=0.1)
    assert requests("chat", "--replicas", "2", "--users", "10") == pytest.approx(
        requests("chat", "--replicas", "2") / 10, rel=0.3
    )
    assert requests("hot_prefix", "--hours", "0.005") == pytest.approx(0.5 * requests("hot_prefix"), rel=0.1)


def test_the_error_for_an_unknown_generator_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gen:poetry: not one of gen:shared_prompt, gen:no_reuse, " in refused(capsys, "gen:poetry")
    assert "gen:: not one of" in refused(capsys, "gen:")


def test_two_processes_print_the_same() -> None:
    command = [sys.executable, "-m", "gateway", "simulate", "gen:chat", "--hours", "0.02", "--replicas", "2"]
    command += ["--policy", "cost,sticky,power_of_two,sglang,llm_d,session", "--json", "--seed", "7"]
    printed = {subprocess.run(command, capture_output=True, timeout=300, check=True).stdout for _ in range(2)}
    assert len(printed) == 1


# -- the picture


def test_a_plot_is_drawn_beside_the_table(chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.png"
    assert main(["simulate", chat, "--policy", "cost,pooled", "--plot", str(file)]) == 0
    assert capsys.readouterr().out.startswith("policy ")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(
    chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not the name of a .png file" in refused(capsys, chat, "--plot", str(tmp_path / "picture.jpg"))
    assert "is not a directory" in refused(capsys, chat, "--plot", str(tmp_path / "nowhere" / "picture.png"))
    (tmp_path / "taken.png").mkdir()
    assert "directory" in refused(capsys, chat, "--plot", str(tmp_path / "taken.png"))


def test_without_matplotlib_the_error_names_what_to_install(chat: str, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; from gateway.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "simulate", chat]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (plain.returncode, plain.stderr) == (0, ""), "nobody else needs it"
    command += ["--plot", str(tmp_path / "picture.png")]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (drawn.returncode, drawn.stdout) == (2, "")
    assert drawn.stderr == "warmroute: --plot: matplotlib is not installed; pip install 'matplotlib>=3.10'\n"


# -- on a terminal


GONE = "\033[?25h\r\033[1A\033[2K"  # the cursor is back, and the line above it, the bar's, is erased


class Terminal:
    """A command whose standard error is a terminal."""

    def __init__(self, *arguments: str, env: Mapping[str, str]) -> None:
        self._screen, theirs = pty.openpty()
        command = [sys.executable, "-m", "gateway", "simulate", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "NO_COLOR": "", **env}
        )
        os.close(theirs)
        self.shown = ""

    def read(self) -> bool:
        """False when the command has closed its end."""
        try:
            self.shown += os.read(self._screen, 4096).decode("utf-8", "replace")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._screen)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with ExitStack() as stack:

        def started(*arguments: str, env: Mapping[str, str] = MappingProxyType({})) -> Terminal:
            command = Terminal(*arguments, env=env)
            stack.callback(command.close)
            return command

        yield started


def test_a_bar_shows_how_far_it_is_and_is_gone_at_the_end(terminal: Callable[..., Terminal]) -> None:
    for workload in ("gen:hot_prefix", "gen:chat"):
        command = terminal(workload, "--hours", "0.05", "--replicas", "4", "--policy", "pooled")
        while command.read():
            pass
        shares = [int(share) for share in re.findall(r"(\d+)%", command.shown)]
        assert shares == sorted(shares)
        assert any(0 < share < 50 for share in shares)
        assert 50 < shares[-1] <= 100
        assert command.shown.endswith(GONE)
        assert command.process.wait() == 0


def test_the_bar_has_no_colours_where_they_are_not_wanted(terminal: Callable[..., Terminal]) -> None:
    short = ("gen:chat", "--hours", "0.01")
    coloured, plain = terminal(*short), terminal(*short, env={"NO_COLOR": "1"})
    for command in (coloured, plain):
        while command.read():
            pass
    assert "\033[3" in coloured.shown
    assert "\033[3" not in plain.shown
    assert "%" in plain.shown


def test_ctrl_c_ends_it_cleanly(terminal: Callable[..., Terminal]) -> None:
    command = terminal("gen:hot_prefix", "--policy", ",".join(["cost"] * 40))
    while "%" not in command.shown:
        assert command.read()
    command.process.send_signal(signal.SIGINT)
    while command.read():
        pass
    assert command.process.wait() == 130
    assert command.shown.endswith(GONE)
    assert "Traceback" not in command.shown


# -- errors

FLAGS = [
    "gateways",
    "sharing-delay",
    "replicas",
    "kv-tokens",
    "prefill-rate",
    "decode-rate",
    "batch-limit",
    "speed",
    "users",
    "max-input",
    "hours",
]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_numbers_must_be_positive(chat: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--{flag}: " in refused(capsys, chat, f"--{flag}", value)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_must_be_numbers(chat: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--speed: " in refused(capsys, chat, "--speed", value)


def test_the_number_of_gateways_is_bounded(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--gateways: 1001 is more than 1000" in refused(capsys, chat, "--gateways", "1001")


def test_a_delay_without_a_second_gateway_is_refused(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--sharing-delay: there is nothing to share with one gateway" in refused(capsys, chat, "--sharing-delay", "5")


def test_an_unknown_policy_is_named(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'fastest' is not one of cost, " in refused(capsys, chat, "--policy", "cost,fastest")
    assert "'' is not one of" in refused(capsys, chat, "--policy", "")


def test_a_missing_file_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, str(tmp_path / "nothing.jsonl"))
    assert "directory" in refused(capsys, str(tmp_path))


PACKED = gzip.compress(lines(CHAT), mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON objects, one a line"),
        (gzip.compress(b"", mtime=0), "JSON objects, one a line"),
        (b"[1, 2]\n", "JSON objects, one a line"),
        (b'{"hash_ids": [1]}\n7\n', "JSON objects, one a line"),
        (lines(CHAT) + b'{"timestamp": 1', "row 21 is not JSON"),
        (b"\xff\xfe\x00garbage", "row 1 is not JSON"),
        (b"[" * 100_000, "row 1 is not JSON"),
        (PACKED[: len(PACKED) // 2], "a damaged gzip file"),
        (PACKED[:-3] + b"abc", "a damaged gzip file"),
        (PACKED[:12] + b"\xff" * 40 + PACKED[52:], "a damaged gzip file"),
        (b"\x1f\x8bnothing of the kind", "a damaged gzip file"),
        (lines([{"prompt": "hello"}]), "neither Mooncake's format"),
        (lines([*CHAT, AGENTS[0]]), "row 21 is not as its format says"),
        (lines([*AGENTS, CHAT[0]]), "row 21 is not as its format says"),
        (lines([{**CHAT[0], "input_length": -1}]), "row 1 is not as its format says"),
    ],
)
def test_a_garbled_trace_is_a_clear_error(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert f"{path}: {message}" in refused(capsys, str(path))


def test_nothing_to_replay_is_a_clear_error(coding: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-input" in refused(capsys, coding, "--max-input", "6463")
    assert "--hours" in refused(capsys, coding, "--hours", "1e-9")


def test_the_command_is_wired(chat: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "simulate", chat],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("cost ")


def test_it_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "--kv-tokens" in printed
    assert all(f"gen:{name}" in printed for name in GENERATORS)
    assert all(name in printed for name in NAMES)
