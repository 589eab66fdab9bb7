"""`warmroute sync`: its flags, its errors, and the whole program in front of a gateway, with the official client."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.config.parse import ConfigError
from gateway.features.prompt_log.delta import command
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.delta.two_gateways import engine_turns
from tests.gateway.features.prompt_log.kept import CHAT, kept_in
from tests.support.fakes import FakeReplica, answers

CA = "--ca-file, --cert-file, --key-file: "


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_flags_make_a_gateway_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_LISTEN", "0.0.0.0:1")
    config: Any = command.config_of(parsed("--upstream", "https://gw.example/v1"))
    (pool,) = config.pools
    assert (pool.replicas[0].url, pool.delta, pool.strip_billing_header) == ("https://gw.example", True, False)
    assert (pool.models, config.timeouts.first_byte_s) == (("*",), command.FIRST_BYTE_S)
    assert (config.listen, config.prompt_log, config.state.url, config.ledger.url) == (command.LISTEN, False, "off", "off")
    assert (config.snapshot.file, config.limits.body_mb, config.timeouts.first_byte_s) == ("off", 1024, 3600.0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--upstream", "ftp://x"], "--upstream: 'ftp://x' is not a base URL such as http://127.0.0.1:9001"),
        (["--upstream", "http://x", "--listen", "x"], "--listen: 'x' is not host:port, for example 0.0.0.0:8000"),
        (["--upstream", "http://x", "--ca-file", "/nowhere"], f"{CA}TLS needs an https URL, got http://x"),
        (["--upstream", "https://x", "--ca-file", "/nowhere"], f"{CA}not on this machine: the file /nowhere does not exist"),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        command.config_of(parsed(*arguments))
    assert str(error.value) == problem


async def test_an_unmodified_client_uploads_its_new_turns(tmp_path: Path) -> None:
    aliases = {"model_aliases": {"claude-*": "m"}}  # which GET /v1/models does not list
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path), **aliases) as far:
        arguments = ["-m", "gateway", "sync", "--upstream", far.url, "--listen", "127.0.0.1:0"]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            line: dict[str, Any] = {}
            while line.get("message") != "listening":
                line = json.loads(await process.stderr.readline())
            async with openai.AsyncOpenAI(base_url=f"{line['url']}/v1", api_key="k", max_retries=0) as client:
                turns: Any = [{"role": "user", "content": "read this " * 500}]
                for _ in range(3):
                    answer = await client.chat.completions.create(model="claude-new", messages=turns)
                    assert [turn["content"] for turn in engine_turns(replica, CHAT)] == [turn["content"] for turn in turns]
                    turns += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and now?"}]
            assert replica.requests[-1].headers["authorization"] == "Bearer k"
            async with far.session.get(f"{line['url']}/metrics") as metrics:
                assert 'warmroute_delta_requests_total{result="delta"} 2' in await metrics.text()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
