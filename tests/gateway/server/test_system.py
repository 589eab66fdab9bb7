"""The whole with real processes: simulated replicas and a gateway started by their commands, the official client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.commands.demo.processes import Process, listening_url, log_line, ready_url
from replica.sim import text as sim_text
from tests.support.tools import tool

WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


@contextlib.contextmanager
def started(name: str, *arguments: str) -> Iterator[Process]:
    process = Process(name, list(arguments))
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)  # after SIGTERM a gateway accepts connections for 2 s more
        process.stop()


@contextlib.contextmanager
def fleet(count: int, *options: str) -> Iterator[tuple[Process, str, dict[str, Process]]]:
    """(gateway, its URL, replicas by name), with no configuration file."""
    with contextlib.ExitStack() as stack:
        arguments = ("replica", "--engine", "sim", "--port", "0", *options)
        replicas = [stack.enter_context(started(f"replica {index}", *arguments)) for index in range(count)]
        urls = [replica.wait_for(ready_url) for replica in replicas]
        flags = [flag for url in urls for flag in ("--replica", url)]
        gateway = stack.enter_context(started("gateway", "serve", "--port", "0", *flags))
        names = (url.removeprefix("http://") for url in urls)
        yield gateway, gateway.wait_for(listening_url), dict(zip(names, replicas, strict=True))


def samples(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def summed(all_samples: dict[str, float], name: str, *labels: str) -> float:
    return sum(value for key, value in all_samples.items() if key.startswith(name) and all(label in key for label in labels))


class Crowd:
    """200 users asking at once, half of them streaming; what became of each."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.raw: Any = client.chat.completions.with_raw_response
        self.begun = 0
        self.many_have_begun = asyncio.Event()
        self.lost: list[str] = []

    async def ask(self, index: int) -> str:
        """The replica that answered, "broken" if its stream broke after its first chunk, "lost" if there was no answer."""
        prompt = f"Question {index}. " + WORDS * 4
        options = {
            "model": "sim",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 20,
            "stream": index % 2 == 0,
        }
        first = True
        try:
            answer = await self.raw.create(**options)
            if options["stream"]:
                async for _ in answer.parse():
                    self.begun += first
                    first = False
                    if self.begun == 20:
                        self.many_have_begun.set()
            else:
                assert answer.parse().choices[0].message.content
        except openai.APIError as error:
            if not first and "failed while it answered" in str(error):
                return "broken"
            self.lost.append(repr(error))
            return "lost"
        return str(answer.headers["x-warmroute-replica"])


async def test_killing_a_replica_loses_no_request_that_had_not_begun_to_stream() -> None:
    rates = ("--prefill-rate", "8000", "--decode-rate", "30", "--max-batch", "256")
    with fleet(2, *rates) as (gateway, url, replicas):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            crowd = Crowd(client)
            asking = [asyncio.create_task(crowd.ask(index)) for index in range(200)]
            await crowd.many_have_begun.wait()
            doomed, survivor = replicas
            os.kill(replicas[doomed].pid, signal.SIGKILL)
            where = Counter(await asyncio.gather(*asking))
        assert crowd.lost == []
        assert sum(where.values()) == 200
        assert where[survivor] > 100, "the doomed replica's requests went to the other one"
        seen = samples(url)
        assert summed(seen, "warmroute_retries_total") > 0, "nothing was retried: the kill came too late to show anything"
        assert summed(seen, "warmroute_replica_inflight") == 0
        assert summed(seen, "warmroute_requests_total", 'code="200"') == 200
        assert seen[f'warmroute_replica_up{{replica="{doomed}"}}'] == 0
        assert gateway.wait_for(is_down) == doomed


def is_down(line: str) -> str:
    event = log_line(line)
    return str(event["replica"]) if event.get("message") == "replica down" else ""


def question(index: int) -> dict[str, Any]:
    """A chat's or a completion's body."""
    prompt = f"Question {index}. " + WORDS * 4
    if index % 3:
        return {"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1000}
    return {"model": "sim", "prompt": prompt + "Answer:", "max_tokens": 1000}


def undisturbed(body: dict[str, Any]) -> list[int]:
    """The tokens of a simulated replica's answer: they depend on the prompt alone."""
    prompt = sim_text.encode(body["prompt"]) if "prompt" in body else sim_text.encode_chat(body["messages"], None)
    return sim_text.answer(prompt, body["max_tokens"], endless=False)[0]


class Readers:
    """Streams that are read at the same time."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self._pieces = Counter[int]()
        self.many_are_under_way = asyncio.Event()

    async def read(self, index: int) -> str:
        body, text = question(index), ""
        kind: Any = self._client.completions if "prompt" in body else self._client.chat.completions
        async for part in await kind.create(**body, stream=True):
            choice = part.choices[0]
            text += choice.text if "prompt" in body else choice.delta.content or ""
            self._pieces[index] += 1
            if sum(count > 4 for count in self._pieces.values()) >= 40:
                self.many_are_under_way.set()
        assert choice.finish_reason == "stop"
        return text


async def test_killing_a_replica_changes_no_text_where_streams_are_resumed(tmp_path: Path) -> None:
    indexes = [index for index in range(300) if 30 < len(undisturbed(question(index))) < 90][:60]
    simulated = ("replica", "--engine", "sim", "--port", "0", "--prefill-rate", "20000", "--decode-rate", "15")
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(started(f"replica {number}", *simulated)) for number in range(2)]
        file = tmp_path / "config.yaml"
        urls = ", ".join(replica.wait_for(ready_url) for replica in replicas)
        file.write_text(f"pools: [{{replicas: [{urls}], resume_streams: true}}]\n", "utf-8")
        gateway = stack.enter_context(started("gateway", "serve", "--port", "0", "--config", str(file)))
        url = gateway.wait_for(listening_url)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            readers = Readers(client)
            reading = [asyncio.create_task(readers.read(index)) for index in indexes]
            await readers.many_are_under_way.wait()
            os.kill(replicas[0].pid, signal.SIGKILL)
            texts = await asyncio.gather(*reading)
        assert texts == [sim_text.decode(undisturbed(question(index))) for index in indexes]
        counts = samples(url)
        good = summed(counts, "warmroute_resumed_streams_total", 'result="good"')
        assert good > 5, "the kill came too late to show anything"
        assert good == summed(counts, "warmroute_resumed_streams_total") == summed(counts, "warmroute_broken_responses_total")
        assert summed(counts, "warmroute_requests_total", 'code="200"') == 60
        assert summed(counts, "warmroute_replica_inflight") == 0


async def test_counters_and_engine_agree_with_what_clients_saw() -> None:
    with fleet(2) as (_, url, replicas):
        seen = Counter[str]()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def converse(name: str) -> None:
                messages: list[Any] = [{"role": "system", "content": name + WORDS * 20}]
                for turn in range(4):
                    messages.append({"role": "user", "content": f"Question {turn}?"})
                    options: dict[str, Any] = {"model": "sim", "messages": messages, "max_tokens": 5}
                    if turn % 2:
                        options |= {"stream": True, "stream_options": {"include_usage": True}}
                        parts = [part async for part in await client.chat.completions.create(**options)]
                        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
                        usage = parts[-1].usage
                    else:
                        answer = await client.chat.completions.create(**options)
                        text, usage = answer.choices[0].message.content, answer.usage
                    assert usage
                    assert usage.prompt_tokens_details
                    assert turn or not usage.prompt_tokens_details.cached_tokens
                    seen["prompt"] += usage.prompt_tokens
                    seen["cached"] += usage.prompt_tokens_details.cached_tokens
                    seen["completion"] += usage.completion_tokens
                    seen["requests"] += 1
                    messages.append({"role": "assistant", "content": text})

            await asyncio.gather(*(converse(f"conversation {index} ") for index in range(6)))
            assert seen["cached"]  # on a busy machine a turn may go to the replica that is idle
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
        ours = samples(url)
        assert summed(ours, "warmroute_requests_total", 'code="200"') == seen["requests"] == 24
        assert summed(ours, "warmroute_requests_total", 'code="404"') == 1
        assert summed(ours, "warmroute_prompt_tokens_total") == seen["prompt"]
        assert summed(ours, "warmroute_prompt_tokens_total", 'cache="hit"') == seen["cached"]
        assert summed(ours, "warmroute_completion_tokens_total") == seen["completion"]
        assert summed(ours, "warmroute_ttft_seconds_count") == 12
        engines = [samples(f"http://{name}") for name in replicas]
        assert sum(summed(engine, "vllm:prefix_cache_hits_total") for engine in engines) == seen["cached"]


@pytest.mark.tools
def test_promtool_accepts_the_metrics() -> None:
    with fleet(1) as (_, url, _replicas):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client:
            client.chat.completions.create(model="sim", messages=[{"role": "user", "content": WORDS * 20}], max_tokens=3)
        page = urllib.request.urlopen(f"{url}/metrics").read()
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
