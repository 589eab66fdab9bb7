"""Data-parallel ranks: several engines with a cache each behind one port, as vLLM serves them.

A request that names its rank in `X-data-parallel-rank` goes there. Any other one goes to the rank with the fewest requests, and
on ties to the next one in turn: as in vLLM, where a conversation wanders from rank to rank.
"""

from collections.abc import Sequence
from contextlib import suppress

from replica.api.validation import ApiError
from replica.engine import Engine

HEADER = "X-data-parallel-rank"


class Ranks:
    """The engines of one replica."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._next = 0

    @property
    def waiting(self) -> int:
        return sum(engine.load().waiting for engine in self.engines)

    @property
    def failure(self) -> str | None:
        """The reason why an engine can serve no more, None while all can."""
        return next((reason for engine in self.engines if (reason := engine.failure()) is not None), None)

    def choose(self, named: str | None) -> int:
        """The rank of a request. `named`: its header. Raises ApiError for a rank that does not exist. O(ranks)."""
        count = len(self.engines)
        if named is not None:
            with suppress(ValueError):  # vLLM ignores other text
                rank = int(named)
                if not 0 <= rank < count:
                    raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {count}).")
                return rank
        if count == 1:
            return 0
        turns = [(self._next + turn) % count for turn in range(count)]
        self._next = (self._next + 1) % count
        return min(turns, key=self._requests)

    def _requests(self, rank: int) -> int:
        load = self.engines[rank].load()
        return load.running + load.waiting

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks of all ranks; False if one of them has kept its own, because requests run there."""
        return all([await engine.reset_prefix_cache() for engine in self.engines])
