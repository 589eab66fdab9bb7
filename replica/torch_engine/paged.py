"""Our block ledger instead of transformers' own bookkeeping of paged KV memory.

Theory of operation. transformers (5.23) has the KV tensors in a `PagedAttentionCache`, whose allocator keeps for each request a
table of block numbers and turns it into the places that the model reads and writes. This is not changed. Allocation, sharing
and eviction are ours: `PATCHED` lists the methods of the cache object that are replaced, with the parameters they must have,
and `install` refuses a transformers release with other signatures. A request's block table is its lease's own list.
transformers' pool of free blocks and its ledger are removed, so that any code that still uses them fails at once, instead of
allocating a block twice.

A request is admitted before it arrives: the cached head of its prompt is held and room for the rest is promised, so no request
is ever preempted. At its first step it also holds the blocks that became cached in between. Only the `Claim` of its admission
allows a request to share blocks. A request without a claim (it was cancelled before it arrived) shares nothing, and never gets
another tenant's blocks.

Threads: the replaced methods run in the engine's thread, `admit` and `withdraw` on the event loop's; a lock is around each.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from replica.cache.blocks import BlockLease, BlockLedger, CacheListener
from replica.cache.prefix import Prefix
from replica.engine import SetupError

BATCH = 64  # blocks copied at once
PATCHED: Mapping[str, tuple[str, ...]] = {
    "search_prefix_match": ("request_id", "prompt_ids"),
    "can_store_request_tokens": ("state", "request_len", "dry_run"),
    "mark_complete_blocks": ("state", "complete_blocks"),
    "free_blocks": ("request_id", "no_cache"),
    "free_all_requests": ("clear_ledgers",),
    "evict_cached_blocks": (),
    "compute_free_capacity": ("relative",),
}


@dataclass(slots=True, eq=False)
class Claim:
    """The prefix that a request may share, and for how many seconds its blocks are retained; `cached_tokens` were found in the
    cache. Once it is `tainted`, no further block of the request is shared.
    """

    prefix: Prefix
    keep_s: float
    cached_tokens: int = 0
    tainted: bool = False


class PagedBlocks:
    """The block ledger behind the interface of transformers' cache."""

    def __init__(
        self,
        cache: Any,
        capacity: int,
        listeners: Items[CacheListener] = (),
        now: Callable[[], float] = time.time,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """changed: called in the engine's thread when a request that did not fit before may fit now."""
        check_signatures(type(cache), "PagedAttentionCache", PATCHED)
        self.now = now
        self._name, self._allocator = next(iter(cache.cache_allocators.items()))
        first = cache.pool.num_reserved_sectors * self._allocator.blocks_per_sector
        self.ledger = BlockLedger(capacity, self._allocator.tokens_per_page, listeners, first)
        self.unused = threading.Event()
        self.unused.set()
        self._lock = threading.Lock()
        self._changed = changed
        self._claims: dict[str, Claim] = {}
        self._leases: dict[str, BlockLease] = {}

    def __repr__(self) -> str:
        return f"<PagedBlocks {len(self._leases)} leases, {self.ledger!r}>"

    @staticmethod
    def can_serve(cache: Any) -> bool:
        """Return whether the blocks of this cache can be shared, which a layer with a sliding window prevents."""
        shared: bool = cache.use_prefix_sharing
        return shared and len(cache.cache_allocators) == 1

    def install(self, cache: Any) -> None:
        """Replace the cache's methods. Call before the first request."""
        for name in PATCHED:
            setattr(cache, name, getattr(self, name))
        cache.pool = self._allocator.pool = _NoPool()
        self._allocator.ledger = None

    def admit(self, request_id: str, claim: Claim, blocks: int) -> bool:
        """Promise blocks to a request before it is handed over, shared ones included. Returns False, and changes nothing, if
        they do not fit beside the blocks that other requests may need.
        """
        with self._lock:
            lease = self.ledger.reserve(claim.prefix, 0, self.now(), claim.keep_s, most=blocks)
            if lease is not None:
                self._claims[request_id] = claim
                self._open(request_id, lease)
            return lease is not None

    def withdraw(self, request_id: str) -> None:
        """Release the promise of an admitted request that was not accepted."""
        self.free_blocks(request_id)

    def reset(self) -> bool:
        """Drop all cached blocks; False, and nothing changed, while they are in use."""
        with self._lock:
            return self.ledger.clear()

    @property
    def row_bytes(self) -> int:
        """Bytes of one block's K and V in all layers."""
        size: int = self._allocator.bytes_per_block
        return size

    def rows(self, blocks: Items[int]) -> Iterator[torch.Tensor]:
        """K and V of these blocks as bytes, one row per block, in host memory; in parts, because all may not fit into it."""
        view = self._allocator._copy_view
        for at in range(0, len(blocks), BATCH):
            yield view[torch.tensor(blocks[at : at + BATCH], device=view.device)].cpu()

    def write(self, blocks: Items[int], rows: torch.Tensor) -> None:
        view = self._allocator._copy_view
        for at in range(0, len(blocks), BATCH):
            view[torch.tensor(blocks[at : at + BATCH], device=view.device)] = rows[at : at + BATCH].to(view.device)

    # -- called by transformers

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """The number of cached tokens that the scheduler reuses for this prompt. It asks again if the request's first step was
        postponed, until some are found.
        """
        with self._lock:
            claim, lease = self._claims.get(request_id), self._leases.get(request_id)
            if claim is None or lease is None:
                return 0
            if len(lease.blocks) == lease.shared:
                self.ledger.rematch(lease)
            claim.cached_tokens = lease.shared * self.ledger.size
            return claim.cached_tokens

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        blocks: int = -(-(state.current_len() + request_len) // self.ledger.size)
        with self._lock:
            lease = self._leases.get(state.request_id)
            if dry_run:
                return blocks - (len(lease.blocks) if lease else 0) <= self.ledger.room
            if lease is None:
                lease = self.ledger.reserve(Prefix((), self.ledger.size), 0, self.now())
                assert lease is not None, "a lease without blocks always fits"
                self._open(state.request_id, lease)
            return self.ledger.grow(lease, blocks, self.now())

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Make computed blocks cached, also the blocks of a request that has just finished, which transformers skips: with
        max_tokens 1 its whole prompt would not be cached. Its lease still exists, since batching is not asynchronous.
        """
        count = complete_blocks.get(self._name, 0)
        with self._lock:
            claim, lease = self._claims.get(state.request_id), self._leases.get(state.request_id)
            if claim is None or claim.tainted or lease is None or not count:
                return
            known = len(claim.prefix.tokens) - len(state.initial_tokens)
            claim.prefix.extend(state.generated_tokens[known:])
            self.ledger.commit(lease, lease.shared + count)
        self._changed()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        with self._lock:
            self._claims.pop(request_id, None)
            lease = self._leases.pop(request_id, None)
            if lease is not None:
                del self._allocator.block_table[request_id]
                self.ledger.release(lease, self.now())
            if not self._leases:
                self.unused.set()
        self._changed()

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Does nothing: transformers' thread calls it when it begins, before any request, but some may be admitted already."""

    def evict_cached_blocks(self) -> bool:
        """Evicts nothing: transformers would drop all unused blocks to make room; the ledger evicts block by block."""
        return False

    def compute_free_capacity(self, relative: bool = True) -> float:
        return self.ledger.room / self.ledger.capacity if relative else float(self.ledger.room * self.row_bytes)

    def _open(self, request_id: str, lease: BlockLease) -> None:
        self.unused.clear()
        self._leases[request_id] = lease
        self._allocator.block_table[request_id] = lease.blocks


class _NoPool:
    """A replacement for transformers' pool, with the only method that is still called; it does nothing."""

    def try_to_free_sectors(self) -> None:
        pass


def check_signatures(owner: type, name: str, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raises SetupError if a class of transformers lacks one of these methods or has it with other parameters."""
    for method, expected in methods.items():
        found = getattr(owner, method, None)
        if found is None or tuple(inspect.signature(found).parameters)[1:] != expected:
            raise SetupError(
                f"transformers {transformers.__version__} has another {name}.{method} than the one that this "
                "replica was made for: pip install '.[replica]' in the checkout for the release that has it"
            )
