"""One long document, and many simultaneous questions about it: the value of a shared prefix for concurrency.

The document is cached before the questions. Its blocks exist once for all requests. An engine that counted them for each
request would run two questions at once where the other runs sixteen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from bench.replica.twin_client import Served, both, emptied, hits, mean_ttft, replay
from bench.replica.twin_traces import VOCABULARY, Arrival

AT_ONCE = 1, 2, 4, 8, 16
DOCUMENT, QUESTION, ANSWER = 8000, 48, 48  # tokens


async def ask_about_document(url: str) -> list[list[Served]]:
    """All requests, by how many are sent at once."""
    document = random.Random("document").choices(VOCABULARY, k=DOCUMENT)
    async with emptied(url) as http:
        await replay(http, [Arrival(0.0, document, 1)])
        return [
            await replay(http, [Arrival(0.0, [*document, *_question(count, number)], ANSWER) for number in range(count)])
            for count in AT_ONCE
        ]


def _question(count: int, number: int) -> list[int]:
    return random.Random(f"{count}.{number}").choices(VOCABULARY, k=QUESTION)


def most_at_once(served: Sequence[Served]) -> int:
    """How many were between their first and their last token at the same time. All were sent at once."""
    return max(sum(other.ttft <= one.ttft < other.e2e for other in served) for one in served)


def document_report(real: Sequence[Sequence[Sequence[Served]]], twin: Sequence[Sequence[Served]]) -> Iterator[str]:
    """real: whenever it was asked; of each time, and of the twin: the requests by how many were sent at once."""
    yield "\n## A shared document\n"
    yield (
        f"{DOCUMENT:,} cached tokens that all requests share, then {QUESTION} of each one's own, and answers of {ANSWER}."
        " *Running*: the most that were between their first and last token at the same moment."
        " TTFT in milliseconds, its mean over all requests: real, twin. *Each time*: of the real one.\n"
    )
    yield "| sent at once | cached | running | TTFT | end to end | each time |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for index, count in enumerate(AT_ONCE):
        times, other = [time[index] for time in real], twin[index]
        everything = [served for time in times for served in time]
        cells = [str(count), f"{hits(everything):.1%}, {hits(other):.1%}"]
        cells.append(f"{min(map(most_at_once, times))}, {most_at_once(other)}")
        cells.append(both([served.ttft for served in everything], [served.ttft for served in other]))
        cells.append(both([served.e2e for served in everything], [served.e2e for served in other]))
        cells.append(", ".join(f"{mean_ttft(time) * 1000:.0f}" for time in times))
        yield "| " + " | ".join(cells) + " |"
