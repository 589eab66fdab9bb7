"""`warmroute demo`: two real replicas, a gateway, two interleaved conversations over one long document, and a table.

All parts are real and started like a user's: inference servers with a real model, a gateway in front, the official `openai`
client. Predicted cached tokens come from the gateway's response header, reported ones from the engine's usage, costs from the
gateway's log line of the request. Then the same prompts are sent through a gateway that routes round robin, on the same
replicas with emptied caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from gateway.commands.demo import script
from gateway.commands.demo.processes import DemoError, Process, admin_url, listening_url, log_line, ready_url
from gateway.commands.demo.table import DemoTurn, Message, print_comparison, print_header, print_turn
from gateway.dialects.usage import Usage

DESCRIPTION: Final = (
    "Start two replicas and a gateway, play two conversations over one long document, and print a table: predicted and reported"
    " cached tokens, TTFT and cost, compared with round robin."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once", action="store_true", help="exit after the table; status 0 if every turn but the first ones hit the cache"
    )
    text = "engine of the replicas: real or simulated (default: %(default)s)"
    parser.add_argument("--engine", choices=["transformers", "sim"], default="transformers", help=text)


def run(options: argparse.Namespace) -> int:
    """Play the demo; returns the exit status: 0 if every second and later turn reported cached tokens."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that every process is stopped on the way out
    try:
        with contextlib.ExitStack() as stack:
            return _play(options.engine, options.once, stack)
    except DemoError as error:
        print(f"warmroute demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped")
        return 0


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _play(engine: str, once: bool, stack: contextlib.ExitStack) -> int:
    _check_client()
    replicas = _start_replicas(engine, stack)
    config = _write_config(replicas, stack)
    gateway = _Gateway(config, "cost", stack)
    print(f"\nTwo conversations over one document of {len(script.DOCUMENT)} characters, through {gateway.url}\n")
    print_header()
    turns = []
    for turn in gateway.converse():
        turns.append(turn)
        print_turn(turn)
    cold = gateway.send("cold", 1, _with_new_beginning(turns[-1].messages))
    tokens = f"{cold.usage.prompt} tokens, {cold.usage.cached or 0} cached"
    print(f"\nFor scale, the last prompt with a changed first line ({tokens}): TTFT {cold.ttft_s:.3f} s")
    again = _replay_round_robin(turns, replicas, config)
    print()
    print_comparison({"warmroute (cost)": turns, "round robin": again})
    warm = [turn for turn in turns if turn.number > 1]
    missed = [turn for turn in warm if not turn.usage.cached]
    print(f"\n{len(warm) - len(missed)} of {len(warm)} later turns hit the cache.")
    if not once:
        _keep_serving(gateway)
    return 1 if missed else 0


def _check_client() -> None:
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise DemoError("the openai client is not installed; run: pip install '.[demo]' in the checkout") from error


# -- the parts


def _start_replicas(engine: str, stack: contextlib.ExitStack) -> list[str]:
    if engine == "transformers":
        prepared = subprocess.run([sys.executable, "-m", "gateway", "replica", "--prepare-only"], check=False)
        if prepared.returncode:
            raise DemoError("the model could not be prepared (see above)")
    options = ["--threads", "1"] if engine == "transformers" else ["--prefill-rate", "700"]
    print(f"Starting two replicas ({engine}) ...", flush=True)
    processes = []
    for number in (1, 2):
        process = Process(f"replica {number}", ["replica", "--engine", engine, "--port", "0", *options])
        stack.callback(process.stop)
        processes.append(process)
    return [process.wait_for(ready_url) for process in processes]


def _write_config(replicas: Sequence[str], stack: contextlib.ExitStack) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-demo-")))
    path = folder / "config.yaml"
    # JSON is YAML.
    config = {
        "listen": "127.0.0.1:0",
        "pools": [{"replicas": list(replicas)}],
        "prices": dict.fromkeys(_MODELS, script.PRICES),
        # It ends with its only client. Answers begin with their first token, so that their heads name the replica.
        "limits": {"drain_accept_s": 0, "keepalive_s": 0},
        "routing": {"expose_headers": "all"},  # the table shows them, even if an admin key is set
    }
    path.write_text(json.dumps(config), "utf-8")
    return path


_MODELS = ("smollm2", "sim")


class _Gateway:
    """A running gateway and an `openai` client in front of it."""

    def __init__(self, config: Path, policy: str, stack: contextlib.ExitStack) -> None:
        import openai

        self._process = Process(f"gateway ({policy})", ["serve", "--config", str(config), "--policy", policy])
        stack.callback(self._process.stop)
        self.url: str = self._process.wait_for(listening_url)
        self.admin_url: str = self._process.wait_for(admin_url)
        self._client = stack.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0))
        self.model = self._client.models.list().data[0].id

    def converse(self) -> Iterator[DemoTurn]:
        """Play the script; every answer becomes part of its conversation."""
        history = {name: [{"role": "system", "content": script.SYSTEM}] for name in script.CONVERSATIONS}
        for index, name in enumerate(script.ORDER):
            number = script.ORDER[: index + 1].count(name)
            messages = history[name]
            messages.append({"role": "user", "content": script.CONVERSATIONS[name][number - 1]})
            turn = self.send(name, number, tuple(messages))
            messages.append({"role": "assistant", "content": turn.answer})
            yield turn

    def send(self, name: str, number: int, messages: Sequence[Message]) -> DemoTurn:
        begun, first, text, usage = time.monotonic(), 0.0, [], None
        client: Any = self._client.chat.completions.with_raw_response
        raw = client.create(
            model=self.model,
            messages=messages,
            max_tokens=script.MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in raw.parse():
            first = first or time.monotonic()
            text += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        if usage is None:
            raise DemoError("an answer has no usage")
        details = usage.prompt_tokens_details
        identity = raw.headers["x-request-id"]
        logged = self._process.wait_for(lambda line: _logged(line, identity))
        return DemoTurn(
            conversation=name,
            number=number,
            replica=raw.headers["x-warmroute-replica"],
            reason=logged["reason"],
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None),
            predicted=int(raw.headers["x-warmroute-cached-tokens"]),
            ttft_s=first - begun,
            cost_usd=logged["cost_usd"] or 0.0,
            saved_usd=logged["saved_usd"] or 0.0,
            messages=messages,
            answer="".join(text),
        )


def _logged(line: str, identity: str) -> dict[str, Any] | None:
    event = log_line(line)
    return event if event.get("message") == "request" and event.get("id") == identity else None


def _with_new_beginning(messages: Sequence[Message]) -> list[Message]:
    head, *rest = messages
    return [{**head, "content": "This is a new edition. " + head["content"]}, *rest]


def _replay_round_robin(turns: Sequence[DemoTurn], replicas: Sequence[str], config: Path) -> list[DemoTurn]:
    """Sends the same prompts, turn by turn, to the same replicas with empty caches."""
    for url in replicas:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")) as answer:
            if not json.loads(answer.read())["success"]:
                raise DemoError(f"{url} did not empty its cache: it is still busy")
    with contextlib.ExitStack() as stack:
        gateway = _Gateway(config, "round_robin", stack)
        return [gateway.send(turn.conversation, turn.number, turn.messages) for turn in turns]


def _keep_serving(gateway: _Gateway) -> None:
    url, admin = gateway.url, gateway.admin_url
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": gateway.model, "messages": [message], "max_tokens": 20, "stream": True})
    print("\nThe gateway stays up until Ctrl-C. To try:\n")
    print(f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print(f"  curl {url}/v1/models\n  curl {admin}/warmroute/replicas\n  curl {admin}/metrics")
    print(f"  curl {admin}/warmroute/route -d '{body}'", flush=True)
    while True:
        time.sleep(0.5)  # not `signal.pause`: a signal just before it would be handled only after the next one
