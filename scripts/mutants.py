"""Break the router on purpose, one place at a time, and see whether its tests notice.

    python -m scripts.mutants          # all of them, a table, exit status 1 if one survives

Each mutant is a small, plausible mistake in the code that matters most: splits, growth, merges, TTL, capacity, the memory
bound, bookings, corrections. It is applied to a copy of the tree; the tests of `tests/router` must fail on it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str
    old: str
    new: str


MUTANTS = (
    # trie: splits and growth
    Mutant("router/trie.py", "if hold.blocks <= at:", "if hold.blocks < at:"),
    Mutant("router/trie.py", "hold.blocks -= at\n", "hold.blocks -= 0\n"),
    Mutant("router/trie.py", "diverges or used_beyond", "diverges"),
    Mutant("router/trie.py", "self._split(child, shared) if", "self._split(child, 1) if"),
    Mutant("router/trie.py", "node.parent = upper\n", "pass\n"),
    Mutant("router/trie.py", "self._uses[replica].link_after(above, hold)", "self._uses[replica].link_after(above, hold.staler)"),
    Mutant("router/trie.py", "if node is self._root or node.children:", "if node is self._root:"),
    Mutant("router/trie.py", "for step, blocks in reversed(path):", "for step, blocks in path:"),
    # trie: merges
    Mutant("router/trie.py", "if hold.fresher is not above or hold.used != above.used:", "if hold.fresher is not above:"),
    Mutant("router/trie.py", "if hold.fresher is not above or hold.used != above.used:", "if hold.used != above.used:"),
    Mutant("router/trie.py", "hold.blocks = 0  # tells", "pass  # tells"),
    Mutant("router/trie.py", "grandchild.parent = node", "pass"),
    Mutant("router/trie.py", "        self._merge(parent)\n", "        pass\n"),
    # trie: TTL
    Mutant("router/trie.py", "if hold.used > alive:", "if hold.used >= alive:"),
    Mutant("router/trie.py", "if hold.used > alive:", "if True:"),
    Mutant("router/trie.py", "hold.used <= self._now - self.ttl_s:", "hold.used < self._now - self.ttl_s:"),
    Mutant("router/trie.py", "        self._expire(replica, uses)\n        if keys:", "        if keys:"),
    Mutant("router/trie.py", "        hold.used = now\n", ""),
    Mutant("router/trie.py", "            uses.freshen(hold)\n", "            pass\n"),
    Mutant("router/trie.py", "self._now = now = max(self._now, now)", "self._now = now"),
    # trie: capacity, memory, forgetting
    Mutant("router/trie.py", "uses.blocks > uses.capacity and", "uses.blocks > uses.capacity + 1 and"),
    Mutant("router/trie.py", "max(0, hold.blocks - excess)", "0"),
    Mutant("router/trie.py", "max(0, hold.blocks - excess)", "hold.blocks - excess"),
    Mutant("router/trie.py", "            self._enforce_capacity(replica, uses)\n            self._enforce_memory()", "            self._enforce_memory()"),
    Mutant("router/trie.py", "            self._enforce_memory()\n", ""),
    Mutant("router/trie.py", "_, replica, uses, hold = min(", "_, replica, uses, hold = max("),
    Mutant("router/trie.py", "if keep < start + shared:", "if keep <= start + shared:"),
    Mutant("router/trie.py", "                self._forget_below(replica, uses, node)\n", ""),
    Mutant("router/trie.py", "if longest == node.length:", "if longest:"),
    Mutant("router/trie.py", "found[replica] = start + min(hold.blocks, shared)", "found[replica] = start + shared"),
    Mutant("router/trie.py", "found[replica] = start + min(hold.blocks, shared)", "found[replica] = start + hold.blocks"),
    # blocks
    Mutant("router/blocks.py", "min(len(left), len(right)) // KEY_BYTES", "min(len(left), len(right)) // KEY_BYTES - 1"),
    Mutant("router/blocks.py", "len(data) + 1, block_bytes", "len(data), block_bytes"),
    Mutant("router/blocks.py", "xxhash.xxh3_64(seed=seed)", "xxhash.xxh3_64()"),
    Mutant("router/blocks.py", 'hasher.update(len(raw).to_bytes(8, "little") + raw)', "hasher.update(raw)"),
    # leases, rates, cost, policies
    Mutant("router/load.py", "        load.booked_tokens -= self.uncached_tokens\n        del", "        del"),
    Mutant("router/load.py", "min(first.uncached_tokens, int(done))", "int(done)"),
    Mutant("router/load.py", "min(first.uncached_tokens, int(done))", "0"),
    Mutant("router/load.py", "if next(iter(load.waiting)) is self:", "if True:"),
    Mutant("router/load.py", "if next(iter(load.waiting)) is self:", "if False:"),
    Mutant("router/load.py", "if self.closed or self.decoding:", "if self.closed:"),
    Mutant("router/load.py", "now - max(self.since, self.ledger.of(self.replica).turn_ended)", "now - self.since"),
    Mutant("router/router.py", "if known else lease.uncached_tokens", "if False else lease.uncached_tokens"),
    Mutant("router/load.py", "if ends > now:", "if True:"),
    Mutant("router/load.py", "and first.silent:", "and True:"),
    Mutant("router/load.py", "            first.prefilled(ends)", "            first.prefilled(now)"),
    Mutant("router/load.py", "if tokens <= 0 or seconds <= 0:", "if tokens <= 0:"),
    Mutant("router/load.py", "keep = 0.5 ** (tokens / RATE_HALF_LIFE_TOKENS)", "keep = 1.0"),
    Mutant("router/load.py", "if load is not None and not load.inflight:", "if load is not None:"),
    Mutant("router/cost.py", "queue_s=queue", "queue_s=0.0"),
    Mutant("router/cost.py", "others_s=arrival_rate * (", "others_s=0 * ("),
    Mutant("router/load.py", "max(0.0, now - self.arrived) / ARRIVAL_WINDOW_S", "max(0.0, now - self.arrived)"),
    Mutant("router/load.py", "        load.count_arrival(self.since)\n", ""),
    Mutant("router/cost.py", "duplicate_s=DUPLICATE_WEIGHT * duplicate", "duplicate_s=0 * duplicate"),
    Mutant("router/policies.py", "(self._key(candidate), chance.random())", "self._key(candidate)"),
    Mutant("router/policies.py", "self._taken[replica] = self._turn", "pass"),
    # router
    Mutant("router/router.py", "        self.trie.insert(best.replica, prompt.keys, now)\n        return Booking", "        return Booking"),
    Mutant("router/router.py", "        self._take_back(booking)\n        booking.chosen = candidate", "        booking.chosen = candidate"),
    Mutant("router/router.py", "            self._take_back(booking)\n            return", "            return"),
    Mutant("router/router.py", "if held + 1 < booking.chosen.matched_blocks:", "if False:"),
    Mutant("router/router.py", "if not booking.lease.close(now):", "if booking.lease.close(now) is None:"),
    Mutant("router/router.py", "duplicate=elsewhere - matched", "duplicate=0"),
    Mutant("router/router.py", "or not 0.01 < units / tokens < 1000", ""),
    Mutant("router/router.py", "int(capacity / block_tokens)", "capacity"),
)  # fmt: skip


def survives(mutant: Mutant) -> bool | None:
    """True if the tests pass on the mutant; None if the place that it changes is not there (a stale mutant)."""
    with tempfile.TemporaryDirectory(prefix="warmroute-mutant-") as folder:
        for part in ("router", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(folder) / part)
        path = Path(folder) / mutant.file
        text = path.read_text("utf-8")
        if mutant.old not in text:
            return None
        path.write_text(text.replace(mutant.old, mutant.new, 1), "utf-8")
        command = [sys.executable, "-m", "pytest", "tests/router", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["--timeout=30", "--hypothesis-profile=mutants"]
        try:
            return subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=90).returncode == 0
        except subprocess.TimeoutExpired:
            return False  # it loops for ever: noticed


def main() -> int:
    words = {True: "SURVIVES", False: "dies", None: "STALE"}
    with ThreadPoolExecutor(2) as pool:
        fates = []
        for mutant, fate in zip(MUTANTS, pool.map(survives, MUTANTS), strict=True):
            fates.append(fate)
            print(f"{words[fate]:<9} {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"\n{fates.count(False)} of {len(fates)} mutants die")
    return 0 if fates.count(False) == len(fates) else 1


if __name__ == "__main__":
    sys.exit(main())
