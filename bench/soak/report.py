"""The report of a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bench.soak.clients import Tally
from bench.soak.law import Limits, Outcome
from bench.soak.watch import Watch
from tests.chaos.load import ANSWERED, CUT, LOST, REFUSED, WRONG


def page(
    made: Sequence[str],
    seen: Outcome,
    watch: Watch,
    limits: Limits,
    done: Counter[str],
    traffic: Counter[str],
    broken: Sequence[str],
) -> str:
    """made: how and where, a paragraph each. broken: what breaks the law."""
    parts = ["# Soak", *made, *verdict(broken, limits)]
    parts += ["## Well-behaved clients", "\n".join(well_behaved(seen.tallies))]
    parts += ["## Hostile clients", "\n".join(hostile(seen.attacks))]
    megabytes = ", ".join(f"{traffic[way] / 1e6:,.0f} MB {way}" for way in ("sent", "received"))
    parts += [f"Bytes of hostile clients: {megabytes}."]
    parts += [
        "## Events",
        "\n".join(["| event | times |", "|---|---|", *(f"| {name} | {count} |" for name, count in sorted(done.items()))]),
    ]
    parts += ["## Over time", "\n".join(over_time(watch, seen.workers))]
    parts += ["## Start and end", "\n".join(start_and_end(seen)), "## Log", "\n".join(log(seen.log))]
    return "\n\n".join(parts) + "\n"


def verdict(broken: Sequence[str], limits: Limits) -> Iterator[str]:
    if broken:
        yield "**The law is broken:**"
        yield "\n".join(f"- {sentence}" for sentence in broken)
    else:
        yield (
            "**The law holds:** every request of a well-behaved client was answered, cut with an error, or refused with one "
            f"(but for those that ran in a worker when it was killed), at least {limits.answered:.0%} of each group's were "
            "answered, and none wrongly; every hostile client that waited for an answer got one or was hung up on, and at "
            f"least {limits.answered:.0%} of each kind came to what it is to come to (`attacks.py`: EXPECTED), but for as many "
            "as the killed workers may have had; no booking is open, no more bytes of requests are held than at the start, no "
            "client's connection is open, and no more sockets or files than at the start but for two connections of each "
            "worker to each replica, the parser processes and their like (`law.py`: LATER); what the gateway counted it also "
            "logged (if no worker was killed), and it logged no error but ended workers; memory grew by at most "
            f"{limits.grow_mb:g} MB a process, and its peak was at most {limits.peak_mb:g} MB; `/health` was answered all the "
            f"time, within {limits.health_s:g} s."
        )


def well_behaved(tallies: Mapping[str, Tally]) -> Iterator[str]:
    yield "| clients | sent | answered | cut | refused | wrong | lost | p50 | p99 |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, tally in tallies.items():
        fates = " | ".join(f"{tally.fates[fate]:,}" for fate in (ANSWERED, CUT, REFUSED, WRONG, LOST))
        yield f"| {name} | {tally.sent:,} | {fates} | {tally.percentile(0.5):.3f} s | {tally.percentile(0.99):.3f} s |"
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[str]())
    if reasons:
        yield ""
        yield "| cut, refused, wrong, lost because | times |"
        yield "|---|---|"
        yield from (f"| {cell(why)} | {count:,} |" for why, count in reasons.most_common(20))


def hostile(attacks: Mapping[str, Counter[str]]) -> Iterator[str]:
    yield "| kind | sent | outcomes |"
    yield "|---|---|---|"
    for kind in sorted(attacks):
        outcomes = ", ".join(f"{name}: {count:,}" for name, count in attacks[kind].most_common())
        yield f"| {kind} | {attacks[kind].total():,} | {outcomes} |"


def over_time(watch: Watch, workers: int) -> Iterator[str]:
    times = ", ".join(f"{name} {watch.health_percentile(share) * 1000:.1f}" for name, share in (("p50", 0.5), ("p99", 0.99)))
    longest = f"{watch.longest_health_s * 1000:.0f} ms"
    yield f"`/health` was polled {len(watch.health):,} times: {times} ms; the longest from one answer to the next {longest}."
    yield ""
    yield "| slowest answers | meanwhile the gateway's main thread ran | was ready and did not run |"
    yield "|---|---|---|"
    for one in watch.slowest:
        ran, ready = (f"{s * 1000:.0f} ms" if workers == 1 else "it is the supervisor's" for s in (one.ran_s, one.ready_s))
        yield f"| {one.took_s * 1000:.0f} ms | {ran} | {ready} |"
    yield ""
    yield f"Peak memory of the gateway's processes, each at its own time: {watch.peak_mb:.0f} MB."
    if watch.failed:
        yield f"Not answered 200: {', '.join(f'{why}: {count}' for why, count in watch.failed.items())}."
    yield ""
    yield "| until | memory, peak | open files, peak | /health, longest |"
    yield "|---|---|---|---|"
    for row in watch.rows():
        yield f"| {row.second:.0f} s | {row.rss_mb:.0f} MB | {row.files} | {row.health_s * 1000:.0f} ms |"


def start_and_end(seen: Outcome) -> Iterator[str]:
    yield "| at rest | start | end |"
    yield "|---|---|---|"
    yield f"| memory | {seen.start.rss_mb:.0f} MB | {seen.end.rss_mb:.0f} MB |"
    for kind in sorted(seen.start.sockets | seen.end.sockets):
        yield f"| open: {kind} | {seen.start.sockets[kind]} | {seen.end.sockets[kind]} |"
    for name in seen.end.bookings:
        yield f"| `warmroute_{name}` | {seen.start.bookings[name]:g} | {seen.end.bookings[name]:g} |"
    yield f"| exit status on SIGTERM | | {seen.exit_status} |"


def log(counts: Mapping[str, object]) -> Iterator[str]:
    messages = counts.get("messages")
    yield f"{counts.get('requests', 0):,} request lines; others:"
    yield ""
    yield "| message | times |"
    yield "|---|---|"
    if isinstance(messages, Mapping):
        yield from (f"| {cell(name)} | {count:,} |" for name, count in sorted(messages.items(), key=lambda item: -item[1])[:25])


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:160]
