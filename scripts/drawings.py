"""Drawings for the documents, from real output: a trace that a gateway has sent, and a report of `warmroute doctor`.

    python -m scripts.drawings [--out docs/images] [--only trace,doctor]

It writes trace.png and doctor.png. Look at them before you commit them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from matplotlib.figure import Figure

from gateway.commands.demo.processes import Process, listening_url, ready_url
from scripts.pictures import ROOT, Json, save, text
from tests.support.collector import Collector, Received

MODEL = "qwen3-coder"
COLOURS = {"server": "#4c6ef5", "internal": "#adb5bd", "client": "#12b886"}
FAILED = "#e03131"
SHOWN = {
    "choose": ("warmroute.reason", "warmroute.cached_tokens.predicted", "warmroute.candidates"),
    "attempt": ("server.port", "error.type", "warmroute.resumes"),
    "admit": ("warmroute.queued_s",),
}
PREFIX = "warmroute."
Report = dict[str, Any]


# -- a trace


async def traced() -> list[Received]:
    """The spans of a request that has waited for a slot, and whose stream broke and was continued by another replica."""
    with tempfile.TemporaryDirectory() as folder:
        async with Collector() as collector, aiohttp.ClientSession() as session:
            both = [_replica(), _replica()]
            try:
                urls = [await asyncio.to_thread(each.wait_for, ready_url) for each in both]
                gateway = _gateway(Path(folder), urls, collector)
                try:
                    url = await asyncio.to_thread(gateway.wait_for, listening_url)
                    await _ask(session, url)
                finally:
                    await asyncio.to_thread(gateway.stop)  # with the last batch
            finally:
                for each in both:
                    await asyncio.to_thread(each.stop)
    return max(_by_trace(collector.spans), key=_interest)


def _replica() -> Process:
    """It breaks some answers off."""
    flags = ["--engine", "sim", "--port", "0", "--served-model-name", MODEL, "--prefill-rate", "4000", "--decode-rate", "60"]
    return Process("replica", ["replica", *flags, "--fault-breaks", "0.4"])


def _gateway(folder: Path, urls: Sequence[str], collector: Collector) -> Process:
    file = folder / "warmroute.yaml"
    settings: Json = {
        "listen": "127.0.0.1:0",
        "admin_listen": "off",
        "pools": [{"replicas": list(urls), "max_inflight": 2, "resume_streams": True}],
        "state": {"url": "off"},
        "snapshot": {"file": "off"},
        "tracing": collector.tracing(),
    }
    file.write_text(yaml.safe_dump(settings), "utf-8")
    return Process("gateway", ["serve", "--config", str(file)])


async def _ask(session: aiohttp.ClientSession, url: str) -> None:
    """Requests at once, that share a head."""
    head = text(random.Random(5), 1500)

    async def one(number: int) -> None:
        messages = [{"role": "system", "content": head}, {"role": "user", "content": f"question {number}"}]
        body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 40}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            await answer.read()

    await asyncio.gather(*(one(number) for number in range(6)))


def _by_trace(spans: Sequence[Received]) -> list[list[Received]]:
    traces: dict[str, list[Received]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    return list(traces.values())


def _interest(spans: list[Received]) -> tuple[int, int]:
    """Attempts, then the wait for a slot."""
    waited = sum(span.ended - span.begun for span in spans if span.name == "admit")
    return sum(span.name == "attempt" for span in spans), waited


def waterfall(spans: list[Received]) -> Figure:
    """The request's span, and below it the spans of its phases and attempts, in order."""
    rows = sorted(spans, key=lambda span: (span.begun, -span.ended))
    begin, whole = rows[0].begun, (rows[0].ended - rows[0].begun) / 1e6
    figure = Figure(figsize=(12, 0.55 + 0.42 * len(rows)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for row, span in enumerate(rows):
        left, width = (span.begun - begin) / 1e6, (span.ended - span.begun) / 1e6
        failed = span.error is not None or "error.type" in span.attributes
        axes.barh(row, max(width, whole / 400), left=left, height=0.62, color=FAILED if failed else COLOURS[span.kind])
        said = [f"{width:.1f} ms"]
        said += [
            f"{key.removeprefix(PREFIX)} {_short(span.attributes[key])}"
            for key in SHOWN.get(span.name, ())
            if key in span.attributes
        ]
        inside = left + width > 0.6 * whole and width > 0.25 * whole
        axes.text(
            left + whole / 150 if inside else left + max(width, whole / 400) + whole / 150,
            row,
            "   ".join(said),
            va="center",
            fontsize=8,
            color="white" if inside else "#333333",
        )
    axes.set_yticks(
        range(len(rows)), [span.name if row == 0 else f"  {span.name}" for row, span in enumerate(rows)], fontsize=9
    )
    axes.set(xlabel="milliseconds since the request came", xlim=(0, whole * 1.02))
    _plain(axes)
    return figure


def _short(value: object) -> object:
    return f"{value:.3f}" if isinstance(value, float) else value


# -- a report of the doctor


def conversations() -> list[Json]:
    """Three agents at once: one without mistakes, one with the time in its system prompt, one with tools in changing order."""
    chance, at, requests = random.Random(3), 0.0, list[Json]()
    names = ("read", "write", "grep", "bash", "edit")
    tools = [{"type": "function", "function": {"name": name, "description": text(chance, 120)}} for name in names]
    for session in range(3):
        system, messages = text(chance, 900), list[Json]()
        for turn in range(8):
            at += 4 + chance.random() * 4
            messages.append({"role": "user", "content": text(chance, 150)})
            head = f"Current time: 2026-11-27T04:{10 + turn}:07Z\n{system}" if session == 1 else system
            listed = [*tools[turn % 5 :], *tools[: turn % 5]] if session == 2 and turn in {3, 6} else tools
            body = {
                "model": MODEL,
                "tools": listed,
                "prompt_cache_key": ("steady", "with the time", "tools in any order")[session],
                "messages": [{"role": "system", "content": head}, *messages],
            }
            requests.append({"path": "/v1/chat/completions", "time": round(at, 2), "body": body})
            messages.append({"role": "assistant", "content": text(chance, 100)})
    return requests


def examined(requests: Sequence[Json]) -> Report:
    """The report of `warmroute doctor`."""
    lines = "\n".join(map(json.dumps, requests))
    command = [sys.executable, "-m", "gateway", "doctor", "-", "--json"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    found: Report = json.loads(done.stdout)
    return found


def breaks(requests: Sequence[Json], report: Report) -> Figure:
    """A bar for each request: its reused, lost and new tokens, with the reason of a loss."""
    found = {each["request"]: each for each in report["findings"]}
    share = report["prompt_tokens"] / sum(len(json.dumps(each["body"])) for each in requests)
    figure = Figure(figsize=(12, 5.6), dpi=110, layout="constrained")
    axes, former, session = figure.add_subplot(), 0.0, ""
    labelled = set[str]()
    for number, request in enumerate(requests, 1):
        body, row = request["body"], number + (number - 1) // 8
        tokens = len(json.dumps(body)) * share
        if body["prompt_cache_key"] != session:
            former, session = 0.0, body["prompt_cache_key"]
            axes.text(0, row - 0.75, f"session: {session}", fontsize=9, color="#333333", va="bottom")
        lost = found[number]["lost_tokens"] if number in found else 0
        parts = [("reused", former - lost, "#12b886"), ("lost: computed before, and once more", lost, FAILED)]
        left = 0.0
        for name, width, colour in (*parts, ("new", tokens - former, "#ced4da")):
            axes.barh(row, width, left=left, height=0.7, color=colour, label=None if name in labelled else name)
            left += width
            labelled.add(name)
        if number in found:
            axes.text(left + 40, row, f"{found[number]['cause']}, {found[number]['where']}", va="center", fontsize=8)
        former = tokens
    axes.set(xlabel="prompt tokens", ylim=(len(requests) + 3.6, -0.6), yticks=[])
    axes.set_xlim(0, axes.get_xlim()[1] * 1.35)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    _plain(axes)
    axes.spines["left"].set_visible(False)
    return figure


def _plain(axes: Any) -> None:
    axes.invert_yaxis() if axes.get_ylim()[0] < axes.get_ylim()[1] else None
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", default="trace,doctor")
    options = parser.parse_args()
    for name in options.only.split(","):
        if name == "trace":
            figure = waterfall(asyncio.run(traced()))
        else:
            requests = conversations()
            figure = breaks(requests, examined(requests))
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        save(drawn.getvalue(), options.out / f"{name}.png")
        print(options.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
