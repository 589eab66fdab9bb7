"""Replicas that a watched file lists."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.features.discovery.file import FileSource
from gateway.features.discovery.section import DiscoveryConfig
from gateway.fleet.membership import Member
from tests.gateway.conftest import eventually


class Seen:
    def __init__(self, source: FileSource) -> None:
        self.source = source
        self.found: list[list[Member]] = []

    @property
    def urls(self) -> list[str] | None:
        return [member.url for member in self.found[-1]] if self.found else None


@contextlib.asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Seen]:
    seen = Seen(FileSource(DiscoveryConfig(file=str(path), pool="p"), poll_s=0.01))

    async def watch() -> None:
        async for members in seen.source.watch(expects=False):
            seen.found.append(list(members))

    task = asyncio.create_task(watch())
    try:
        yield seen
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def write(path: Path, text: str) -> None:
    """As one should: whole, or not at all."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


async def test_what_it_lists_are_members_and_changes_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    write(
        path,
        "replicas:\n- http://a:1/v1\n"
        "- {url: http://b:2, name: b, pool: large, capacity_tokens: 7, weight: 5, draining: true}\n"
        "- {url: http://c:3, role: prefill, bootstrap_port: 9}\n",
    )
    async with watching(path) as seen:
        await eventually(lambda: seen.found)
        assert seen.found == [
            [
                Member("a:1", "http://a:1", ""),
                Member("b", "http://b:2", "large", 7, draining=True, weight=5),
                Member("c:3", "http://c:3", "", role="prefill", bootstrap_port=9),
            ]
        ]
        write(path, "replicas: [http://c:3]")
        await eventually(lambda: seen.urls == ["http://c:3"])
        write(path, "replicas: []")
        await eventually(lambda: seen.urls == [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("replicas: [ftp://a]", "is not a base URL"),
        ("replicas: [{name: a}]", "missing"),
        ("replica: [http://a:1]", "did you mean 'replicas'?"),
        ("- http://a:1", "a mapping of keys is expected"),
        ("replicas: [http://a:1\n", "not valid YAML"),
        ("", "missing"),
        ("replicas: [" + "http://a:1, " * 3000 + "]", "2048"),
        ("x" * (2 << 20), "too large"),
        ("replicas: [http://a:1]\nreplicas: [http://b:1]", "given twice"),
        (
            "replicas:\n- http://a:1\n- {url: http://b:1, role: decode, bootstrap_port: 9}",
            "3: replicas[1].bootstrap_port: only",
        ),
    ],
    ids=range(10),
)
async def test_an_invalid_file_changes_nothing_and_is_named(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    write(path, "replicas: [http://a:1]")
    async with watching(path) as seen:
        await eventually(lambda: seen.found)
        write(path, text)
        await eventually(lambda: problem in seen.source.problem)
        assert seen.urls == ["http://a:1"]
        write(path, "replicas: [http://b:1]")
        await eventually(lambda: seen.urls == ["http://b:1"] and not seen.source.problem)


async def test_a_missing_file_is_named_and_found_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    async with watching(path) as seen:
        await eventually(lambda: "No such file" in seen.source.problem)
        write(path, "replicas: [http://a:1]")
        await eventually(lambda: seen.urls == ["http://a:1"] and not seen.source.problem)
        path.unlink()
        await eventually(lambda: "No such file" in seen.source.problem)
        assert seen.urls == ["http://a:1"]


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    os.mkfifo(path)
    async with watching(path) as seen:
        await eventually(lambda: "not a regular file" in seen.source.problem)
