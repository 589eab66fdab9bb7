"""A gateway that is killed: each head that a client was told is there after a restart, with its whole log."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import pytest

from gateway.features.histories.records import UnknownObjectError
from gateway.features.prompt_log.bases import base_of
from gateway.features.prompt_log.naming.chain import DIGEST, chains_of, head_name
from gateway.request.owner import owner_of
from tests.gateway.features.histories.conftest import file_url, opened
from tests.support.paths import ROOT

# Lanes of clients, each of which goes on from its last head, and says each head that it was told. The gateway runs in the same
# process, so a kill hits it wherever it is.
CLIENTS = """
import asyncio, sys
from pathlib import Path
from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import NOW, asked, engine, kept_in
from tests.support.fakes import FakeReplica

async def lane(run, path, stream, number):
    head = ""
    for turn in range(100_000):
        base = f', base="{head}"' if head else ""
        said = {"role": "user", "content": f"{path} {stream} {number} {turn % 8}"}
        _, told, _ = await asked(run, path, f"keep{base}", [said], stream=stream)
        if told["kept"]:
            head = "" if turn % 8 == 7 else told["head"]
            print(told["head"], told["length"], flush=True)

async def main():
    path, stream = sys.argv[2], sys.argv[3] == "stream"
    async with FakeReplica([engine(path, stream=stream)]) as replica, running(replica, **kept_in(Path(sys.argv[1]))) as run:
        await asyncio.gather(*(lane(run, path, stream, number) for number in range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("path", "form"), [("/v1/chat/completions", "stream"), ("/v1/messages", "plain"), ("/v1/responses", "stream")]
)
async def test_a_head_that_a_client_was_told_outlives_a_kill(path: str, form: str, tmp_path: Path) -> None:
    arguments = sys.executable, "-c", CLIENTS, str(tmp_path), path, form
    process = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    told = list[bytes]()
    try:
        for _ in range(random.Random(path).randrange(12, 40)):
            told.append(await process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    told += [line for line in (await process.stdout.read()).splitlines(keepends=True) if line.endswith(b"\n")]
    owner = owner_of("", "Bearer k", None)
    async with opened(file_url(tmp_path / "state.db")) as store:  # its clock is long before all expiries
        for line in told:
            head, length = line.decode().split()
            turn = next(each for each in await store.turns_at(owner, head) if not each.at_input)
            base = await base_of(store, owner, turn, 1 << 30)
            assert len(base.digests) == int(length) * DIGEST
            assert head_name(list(chains_of(base.digests))[-1]) == head
        with pytest.raises(UnknownObjectError):
            await store.turns_at(owner, head_name(b"x" * 32))
