"""Token ids of prompts, from the engines themselves: their /tokenize takes the body of a request as it is.

A prompt is tokenized once; equal bodies, and turns that continue a prompt, find it here. Requests wait only as long as it
should be of use; a late answer is for the next turn. Bounds: RUNNING questions to a replica at once, bodies of MAX_BODY bytes,
KEPT_BYTES of token ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import Final

import msgspec
import xxhash

from gateway.errors import GatewayError, ReplicaFailure
from gateway.upstream.client import ReplicaCall, UpstreamClient
from router import token_bytes
from router.types import KEY_BYTES, BlockKeys

TIMEOUT_S: Final = 10.0
RUNNING: Final = 4
MAX_BODY: Final = 4 << 20
KEPT_BYTES: Final = 64 << 20
ENTRY_BYTES: Final = 400  # of a kept prompt, beside its ids
UNABLE_S: Final = 600.0  # until a replica that does not tokenize is asked again
_MOST_BYTES: Final = 32 << 20
_LARGE: Final = 256 << 10  # bytes of an answer that are decoded in a thread
_HEADERS: Final = b"Content-Type: application/json\r\nAccept-Encoding: identity\r\n"
_REFUSALS: Final = frozenset([401, 403, 404, 405, 501])


class TokenizeAnswer(msgspec.Struct):
    """The answer of /tokenize."""

    tokens: list[int]


_decode: Final = msgspec.json.Decoder(TokenizeAnswer).decode


class KeptTokens:
    """Token ids of prompts, the least recently used forgotten first: by the digest of a body, and by the last block key of its
    canonical prompt. All operations O(1), except `prefix`.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._kept: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()  # (ids, last key)
        self._ends: dict[bytes, int] = {}

    def get(self, digest: int) -> bytes | None:
        found = self._kept.get(digest)
        if found is None:
            return None
        self._kept.move_to_end(digest)
        return found[0]

    def put(self, digest: int, data: bytes, keys: BlockKeys) -> None:
        """Keep the ids of a prompt with these block keys."""
        if digest in self._kept or not data or len(data) > KEPT_BYTES // 4:
            return
        end = keys[-KEY_BYTES:]
        self._kept[digest] = data, end
        if end:
            self._ends[end] = digest
        self._bytes += len(data) + ENTRY_BYTES
        while self._bytes > KEPT_BYTES:
            old, (gone, last) = self._kept.popitem(last=False)
            self._bytes -= len(gone) + ENTRY_BYTES
            if self._ends.get(last) == old:
                del self._ends[last]

    def prefix(self, keys: BlockKeys) -> bytes | None:
        """The ids of the longest known prompt whose full blocks begin this one; their end may differ. O(blocks of it)."""
        for at in range(len(keys) - KEY_BYTES, -1, -KEY_BYTES):
            if (digest := self._ends.get(keys[at : at + KEY_BYTES])) is not None:
                return self.get(digest)
        return None

    def __len__(self) -> int:
        return len(self._kept)


class EngineTokenizer:
    """Asks replicas for the token ids of prompts. seconds_per_byte: how long they have taken lately."""

    def __init__(self, upstream: UpstreamClient) -> None:
        self._upstream = upstream
        self._running: Counter[str] = Counter()
        self._unable: dict[str, float] = {}
        self._tasks: dict[int, asyncio.Task[bytes | None]] = {}
        self.seconds_per_byte = 0.0

    def able(self, url: str, now: float) -> bool:
        """True if a question to this replica makes sense now."""
        return self._running[url] < RUNNING and now - self._unable.get(url, float("-inf")) > UNABLE_S

    def ask(self, digest: int, url: str, body: bytes, now: float, *, listed: bool) -> asyncio.Task[bytes | None]:
        """The running question for this body, or a new one. Its result: the ids, None: unknown. listed: the replica lists the
        model, so that a refusal is not because of that.
        """
        task = self._tasks.get(digest)
        if task is None:
            task = self._tasks[digest] = asyncio.get_running_loop().create_task(self._ask(url, body, now, listed=listed))
            task.add_done_callback(lambda _task: self._tasks.pop(digest, None))
        return task

    async def _ask(self, url: str, body: bytes, now: float, *, listed: bool) -> bytes | None:
        self._running[url] += 1
        try:
            answer = await self._upstream.open(url, ReplicaCall("POST", "/tokenize", _HEADERS, body, probe=True), TIMEOUT_S)
            try:
                if answer.status != 200:
                    if answer.status in _REFUSALS and listed:
                        self._unable[url] = now
                    return None
                raw = await answer.read(_MOST_BYTES)
            finally:
                answer.close()
            return await asyncio.to_thread(_ids, raw) if len(raw) > _LARGE else _ids(raw)
        except (ReplicaFailure, GatewayError, TimeoutError):
            return None
        finally:
            self._running[url] -= 1
            if not self._running[url]:
                del self._running[url]

    def took(self, size: int, seconds: float) -> None:
        """A body of this size took so long."""
        rate = seconds / (size + 4096)
        self.seconds_per_byte += (rate - self.seconds_per_byte) * 0.2

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ids(raw: bytes) -> bytes | None:
    """The token ids of an answer, 4 bytes each; None if it has none."""
    try:
        return token_bytes(_decode(raw).tokens)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def digest_of(model: str, body: bytes) -> int:
    return xxhash.xxh3_128_intdigest(model.encode("utf-8", "surrogatepass") + b"\0" + body)
