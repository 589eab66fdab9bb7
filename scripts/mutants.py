"""Break the router on purpose, one place at a time, and see whether its tests notice.

    python -m scripts.mutants              # all of them, a table, exit status 1 if one survives
    python -m scripts.mutants evidence     # those of files with this in their name

Each mutant is a small, plausible mistake in the code that matters most: splits, growth, merges, TTL, capacity, the memory
bound, bookings, costs, learning, corrections. It is applied to a copy of the tree; the tests of `tests/router` must fail on it.
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
    Mutant("router/tree.py", "if hold.blocks <= at:", "if hold.blocks < at:"),
    Mutant("router/tree.py", "hold.blocks -= at\n", "hold.blocks -= 0\n"),
    Mutant("router/tree.py", "if (partly or at < end) and", "if at < end and"),
    Mutant("router/tree.py", "self._split(node, shared)", "self._split(node, 1)"),
    Mutant("router/tree.py", "node.parent = upper\n", "pass\n"),
    Mutant("router/tree.py", "link_after(above, hold)", "link_after(above, hold.staler)"),
    Mutant("router/tree.py", "above.confirmed = min(hold.confirmed, at)", "above.confirmed = hold.confirmed"),
    Mutant("router/tree.py", "above.doomed = max(0, hold.doomed - hold.blocks)", "above.doomed = 0"),
    Mutant("router/tree.py", "if node is self._root or node.children:", "if node is self._root:"),
    Mutant("router/tree.py", "node, blocks, parent = parent, parent.length,", "node, parent = parent,"),
    # trie: no more edges on a path than there may be
    Mutant("router/tree.py", "depth + node.height < self.max_edges:", "depth < self.max_edges:"),
    Mutant("router/tree.py", "depth + node.height < self.max_edges:", "depth + node.height <= self.max_edges:"),
    Mutant("router/tree.py", "if depth < self.max_edges or not node.children:", "if True:"),
    Mutant("router/tree.py", "        self._raise(node)\n", "        pass\n"),
    Mutant("router/tree.py", "            self._raise(leaf)\n", "            pass\n"),
    Mutant("router/tree.py", "        node.height = child.height\n", "        pass\n"),
    Mutant("router/tree.py", "start * KEY_BYTES, start * KEY_BYTES", "at, at"),
    # trie: merges
    Mutant("router/tree.py", "if hold.fresher is not above or hold.used != above.used:", "if hold.fresher is not above:"),
    Mutant("router/tree.py", "if hold.fresher is not above or hold.used != above.used:", "if hold.used != above.used:"),
    Mutant("router/tree.py", "uses.pending += hold.confirmed\n", "pass\n"),
    Mutant("router/tree.py", "grandchild.parent = node", "pass"),
    Mutant("router/tree.py", "        self._merge(parent)\n", "        pass\n"),
    Mutant("router/tree.py", "        self._walked, self._path, self._before, self._shared = b\"\", self._no_path, 0, 0", "        pass"),
    # trie: TTL
    Mutant("router/trie.py", "if held and hold.used > alive and", "if held and hold.used >= alive and"),
    Mutant("router/trie.py", "if held and hold.used > alive and", "if held and"),
    Mutant("router/trie.py", "hold.used <= stale:", "hold.used < stale:"),
    Mutant("router/trie.py", "            self._expire(replica, uses, left)\n            self._foresee", "            self._foresee"),
    Mutant("router/trie.py", "left = self._reclaim(self._insert_holds) if self._dead else self._insert_holds\n            ", "left = 9\n            "),
    Mutant("router/tree.py", "elif used is None and last > stale:", "elif used is None:"),
    Mutant("router/holds.py", "            if used <= stale:\n", "            if False:\n"),
    Mutant("router/holds.py", "        hold.used = now\n", ""),
    Mutant("router/holds.py", "            self.freshen(hold)\n", "            pass\n"),
    Mutant("router/trie.py", "now = max(self.now, now)\n        if uses.capacity", "now = now\n        if uses.capacity"),
    # trie: purges
    Mutant("router/trie.py", "math.nextafter(self.now, math.inf)", "self.now"),
    Mutant("router/trie.py", "dead.floor = self.now", "dead.floor = self.now - 1"),
    Mutant("router/trie.py", " and (all_live or not self._is_dead(replica, hold)):", ":"),
    Mutant("router/tree.py", "                self._bury(node, replica)\n", "                pass\n"),
    Mutant("router/tree.py", "        if self._dead and self._is_dead(replica, hold):\n            return", "        if False:\n            return"),
    Mutant("router/holds.py", "        self.count += other.count\n", ""),
    Mutant("router/trie.py", "(self._dead and self._is_dead(replica, tail))", "False"),
    # trie: pending credits
    Mutant("router/trie.py", "uses.blocks - uses.pending > capacity and", "uses.blocks > capacity and"),
    Mutant("router/trie.py", "uses.blocks - uses.pending > capacity and", "uses.blocks - uses.pending > capacity + 1 and"),
    Mutant("router/trie.py", "min(hold.confirmed, uses.blocks - uses.pending - capacity)", "hold.confirmed"),
    Mutant("router/trie.py", "hold.blocks > blocks or self._held_below(node, replica)", "hold.blocks > blocks"),
    Mutant("router/trie.py", "hold.blocks > blocks or self._held_below(node, replica)", "self._held_below(node, replica)"),
    Mutant("router/trie.py", "keep = hold.confirmed if hold.used > stale else 0", "keep = 0"),
    Mutant("router/trie.py", "        self.pending_bytes += growth\n", ""),
    Mutant("router/trie.py", "if self.pending_bytes + growth >", "if growth >"),
    Mutant("router/trie.py", "while hold.confirmed < blocks:", "while False:"),
    Mutant("router/trie.py", "not 0 < blocks <= tail.blocks", "not 0 < blocks"),
    Mutant("router/trie.py", "if end > 0 and node.edge", "if node.edge"),
    Mutant("router/trie.py", " and node.edge[end - KEY_BYTES : end] == keys[-KEY_BYTES:] else 0", " else 0"),
    Mutant("router/trie.py", "if node.holders.get(replica) is not tail:", "if False:"),
    Mutant("router/trie.py", "min(uses.blocks - capacity, capacity // 2)", "uses.blocks - capacity"),
    Mutant("router/trie.py", "        elif uses.dooms:\n            uses.foresee(0, MOST_FORESEEN)\n", ""),
    Mutant("router/trie.py", "held = hold.blocks - hold.doomed", "held = hold.blocks"),
    Mutant("router/holds.py", "            hold.doomed = 0\n        hold.used", "        hold.used"),
    Mutant("router/holds.py", "hold.doomed = max(0, hold.doomed - gone)", "pass"),
    Mutant("router/holds.py", "        self.pending -= hold.blocks - hold.confirmed\n", ""),
    # trie: capacity, memory
    Mutant("router/trie.py", "keys = keys[: uses.capacity * KEY_BYTES]", "pass"),
    Mutant("router/trie.py", "        self._enforce_capacity(replica, uses, left)\n        self._enforce_memory()", "        self._enforce_memory()"),
    Mutant("router/trie.py", "        self._enforce_memory()\n        self._foresee(uses)", "        self._foresee(uses)"),
    Mutant("router/trie.py", "_, replica, uses, hold = min(", "_, replica, uses, hold = max("),
    Mutant("router/trie.py", "self.max_bytes - self.max_bytes // PENDING_SHARE + self.pending_bytes", "self.max_bytes"),
    Mutant("router/tree.py", "if longest == node.length:", "if longest:"),
    Mutant("router/trie.py", "blocks if blocks < known else known", "known"),
    Mutant("router/trie.py", "blocks if blocks < known else known", "blocks"),
    # trie: what it tells about use and room
    Mutant("router/trie.py", "return None if used is None else now - used", "return 0.0 if used is None else now - used"),
    Mutant("router/trie.py", "(out if out > 0 else 0)", "out"),
    Mutant("router/trie.py", "(held if held < uses.capacity else uses.capacity) + blocks", "held + blocks"),
    Mutant("router/trie.py", "uses.survivor_used if uses.dooms else uses.ring.fresher.used", "uses.ring.fresher.used"),
    Mutant("router/trie.py", "if uses is None or uses.capacity is None or not uses.count:", "if uses is None or uses.capacity is None:"),
    Mutant("router/trie.py", "self._learn_lifetime(self.now - hold.used, evicted,", "self._learn_lifetime(self.now - hold.used, 1,"),
    Mutant("router/trie.py", "Ratio(max(idle_s, 1.0), blocks,", "Ratio(max(idle_s, 1.0), 1e9,"),
    Mutant("router/trie.py", "max(idle_s, 1e-3) * blocks", "idle_s * blocks"),
    Mutant("router/trie.py", "max(idle_s, 1e-3) * blocks, blocks, blocks", "max(idle_s, 1e-3) * blocks, blocks, 0"),
    Mutant("router/holds.py", "and hold.used > since:", "and hold.used >= since:"),
    Mutant("router/holds.py", "            blocks += hold.blocks\n", "            blocks += 1\n"),
    Mutant("router/holds.py", "            if holds == most_holds:\n                return None\n", ""),
    # blocks
    Mutant("router/blocks.py", "min(len(left), len(right)) // KEY_BYTES", "min(len(left), len(right)) // KEY_BYTES - 1"),
    Mutant("router/blocks.py", "len(data) + 1, block_bytes", "len(data), block_bytes"),
    Mutant("router/blocks.py", 'seed.to_bytes(KEY_BYTES, "little")', "b\"\""),
    Mutant("router/blocks.py", "if chars <= KEPT_CHARS else", "if chars else"),
    Mutant("router/blocks.py", 'hasher.update(len(raw).to_bytes(8, "little") + raw)', "hasher.update(raw)"),
    # leases
    Mutant("router/load.py", "        load.booked_tokens -= self.uncached_tokens\n        load.leave", "        load.leave"),
    Mutant("router/load.py", "(done if done < first.uncached_tokens else first.uncached_tokens)", "done"),
    Mutant("router/load.py", "        if done <= 0:\n", "        if True:\n"),
    Mutant("router/load.py", "if load.first is self:", "if True:"),
    Mutant("router/load.py", "if load.first is self:", "if False:"),
    Mutant("router/load.py", "if self.closed or self.decoding:", "if self.closed:"),
    Mutant("router/load.py", "now - max(self.since, self.load.turn_ended)", "now - self.since"),
    Mutant("router/load.py", "if ends > now:", "if True:"),
    Mutant("router/load.py", "            if not first.silent:\n                return first\n", ""),
    Mutant("router/load.py", "            first.prefilled(ends)", "            first.prefilled(now)"),
    Mutant("router/load.py", "if load is not None and not load.inflight:", "if load is not None:"),
    # speeds, and who comes back
    Mutant("router/load.py", "if tokens <= 0 or seconds <= 0:", "if tokens <= 0:"),
    Mutant("router/load.py", "if tokens <= 0 or seconds <= 0:", "if seconds <= 0:"),
    Mutant("router/load.py", "            seconds = weight / rate.near(seen)\n", ""),
    Mutant("router/load.py", "            weight = min(weight, RATE_HALF_LIFE_TOKENS)\n", ""),
    Mutant("router/load.py", "sum(known) / len(known) if known", "sum(known) if known"),
    Mutant("router/load.py", "sum(known) / len(known) if known", "max(known) if known"),
    Mutant("router/load.py", "RATE_PRIOR_TOKENS / rate, ", "RATE_PRIOR_TOKENS, "),
    Mutant("router/load.py", "if ago > 0 else 1.0)", "if True else 1.0)"),
    Mutant("router/load.py", "if ago > 0 else 1.0) / gap_s", "if ago > 0 else 1.0)"),
    Mutant("router/load.py", "self.return_rate(now, gap_s) * gap_s + 1", "self.answered + 1"),
    Mutant("router/load.py", "gap_s + 1\n        self.answered_at = max(self.answered_at, now)", "gap_s + 1\n        self.answered_at = now"),
    Mutant("router/load.py", ".count_answer(now, self.ledger.turn_gap.value)", ".settle(now)"),
    Mutant("router/load.py", "- math.exp(-idle_s / gap_s))", "- 1)"),
    Mutant("router/load.py", "max(0.0, self.return_rate(now, gap_s) * gap_s", "(self.return_rate(now, gap_s) * gap_s"),
    Mutant("router/load.py", "        if next_turn:\n", "        if True:\n"),
    Mutant("router/learned.py", "math.pow(0.5, weight / self._half_life)", "1.0"),
    Mutant("router/learned.py", "math.pow(0.5, weight / self._half_life)", "math.pow(0.5, 1 / self._half_life)"),
    Mutant("router/learned.py", "self._under * keep + under", "self._under * keep + weight"),
    Mutant("router/learned.py", "self._over = value * weight", "self._over = value"),
    Mutant("router/learned.py", "self._STEP * weight", "self._STEP"),
    Mutant("router/learned.py", "if seen > self.value else", "if seen > self._low else"),
    Mutant("router/learned.py", "min(self._high, max(self._low, ", "max(self._low, ("),
    # the cost
    Mutant("router/cost.py", "        queue,\n", "        0.0,\n"),
    Mutant("router/cost.py", "(queue * work + work * work / 2)", "(queue * work + work * work)"),
    Mutant("router/cost.py", "return_rate * (", "0 * ("),
    Mutant("router/cost.py", "DUPLICATE_WEIGHT * duplicate", "0 * duplicate"),
    Mutant("router/cost.py", "        evicted / prefill_rate", "        evicted"),
    Mutant("router/cost.py", "decoding * DECODE_TOKENS", "DECODE_TOKENS"),
    Mutant("router/cost.py", "if idle_s > 0 else 1.0", "if True else 1.0"),
    Mutant("router/cost.py", "-min(copy, rent_s)", "-rent_s"),
    Mutant("router/cost.py", "+ full.duplicate_s + full.evicted_s", "+ full.duplicate_s"),
    # what all of it costs, and which is cheapest
    Mutant("router/pricing.py", " and name in replicas", ""),
    Mutant("router/pricing.py", "if blocks > longest and", "if"),
    Mutant("router/pricing.py", "self._per_block + 0.5", "self._per_block"),
    Mutant("router/pricing.py", "return tokens if tokens < self.total else self.total", "return tokens"),
    Mutant("router/pricing.py", "prompt.keys[end - KEY_BYTES : end]", "prompt.keys[:end]"),
    Mutant("router/pricing.py", "duplicate=uncached - self.least", "duplicate=0"),
    Mutant("router/pricing.py", "if self._rent and blocks < self.longest", "if self._rent"),
    Mutant("router/pricing.py", "uncached * out / new", "uncached"),
    Mutant("router/pricing.py", "* reuse_chance(self._now - used, self._lifetime_s)", ""),
    Mutant("router/pricing.py", "dear = floor > bound_s * load.rate.value", "dear = True"),
    Mutant("router/pricing.py", "if dear and (idle or blocks == longest):", "if dear:"),
    Mutant("router/pricing.py", "if dear or floor > bound_s * load.rate.value or", "if dear or"),
    Mutant("router/pricing.py", "if dear or floor > bound_s * load.rate.value or", "if floor > 2 * bound_s * load.rate.value or"),
    Mutant("router/pricing.py", "dear = floor > bound_s * load.rate.value", "dear = floor > least_s * load.rate.value"),
    Mutant("router/pricing.py", "dear = floor > bound_s * load.rate.value", "dear = floor > bound_s * 8000"),
    Mutant("router/pricing.py", "DUPLICATE_WEIGHT * (uncached - least) +", "DUPLICATE_WEIGHT * uncached +"),
    Mutant("router/pricing.py", "DUPLICATE_WEIGHT * (total - least)", "DUPLICATE_WEIGHT * (total + least)"),
    Mutant("router/pricing.py", "lacking + DECODE_TOKENS * load.decoding", "lacking + DECODE_TOKENS * load.inflight"),
    Mutant("router/pricing.py", "- least) + DECODE_TOKENS * load.decoding", "- least) + DECODE_TOKENS * load.inflight"),
    Mutant("router/pricing.py", "load.booked_tokens - head.uncached_tokens", "load.booked_tokens"),
    Mutant("router/pricing.py", " or (best and name == first)", ""),
    Mutant("router/pricing.py", " or (best and name == first)", " or name == best"),
    Mutant("router/pricing.py", "chance.random() * ties < 1:", "chance.random() < 0.5:"),
    Mutant("router/pricing.py", "if chance.random() * ties < 1:", "if False:"),
    Mutant("router/pricing.py", "head := load.settle(now) if load.first", "head := load.first if load.first"),
    Mutant("router/pricing.py", "            elif blocks < longest:\n", "            else:\n"),
    Mutant("router/pricing.py", "if best.matched_blocks == self.longest", "if best.matched_blocks"),
    # rent or buy
    Mutant("router/replication.py", "        if seconds <= 0:\n            return\n", ""),
    Mutant("router/replication.py", "self._paid.pop(prefix, 0.0) + seconds", "seconds"),
    Mutant("router/replication.py", "self._paid.pop(prefix, 0.0)", "self._paid.get(prefix, 0.0)"),
    Mutant("router/replication.py", "> MAX_PREFIXES:", "> MAX_PREFIXES + 1:"),
    Mutant("router/replication.py", "popitem(last=False)", "popitem()"),
    Mutant("router/replication.py", "        self._paid.pop(prefix, None)", "        pass"),
    Mutant("router/router.py", "            self._rent(quotes.shared_prefix, None)", "            pass"),
    Mutant("router/router.py", "        elif idle and best", "        elif best"),
    Mutant("router/router.py", "now - since > LONG_S or", ""),
    Mutant("router/router.py", " or evidence.purged_at >= since:", ":"),
    Mutant("router/router.py", "        self.trie.insert(name, prompt.keys, now)  # this prompt", "        pass  # this prompt"),
    # several processes
    Mutant("router/follow.py", "if number in bookings or", "if"),
    Mutant("router/follow.py", " or known is None:", ":"),
    Mutant("router/follow.py", "Outcome(booking.lease.decoding)", "Outcome(True)"),
    Mutant("router/follow.py", "_opened(booking, silent=True)", "_opened(booking, silent=booking.lease.silent)"),
    Mutant("router/follow.py", "        del self.open[booking.number]\n", ""),
    Mutant("router/follow.py", "        booking.lease.load.elsewhere += 1\n", ""),
    Mutant("router/follow.py", "        if len(self.events) == 1:\n", "        if True:\n"),
    Mutant("router/follow.py", "                booking.lease.first_token(event[2])", "                pass"),
    Mutant("router/router.py", "best.cost.queue_s)", "best.cost.total_s)"),
    # what the engines' counts say
    Mutant("router/evidence.py", "return self.hits and len(self._lost)", "return len(self._lost)"),
    Mutant("router/evidence.py", "len(self._lost) >= RESTART_MISSES and", "len(self._lost) > RESTART_MISSES and"),
    Mutant("router/evidence.py", " and len(self._losers) >= clients", ""),
    Mutant("router/evidence.py", "clients = 1 if alone else RESTART_CLIENTS", "clients = RESTART_CLIENTS"),
    Mutant("router/evidence.py", "if miss.nothing and len(self._lost)", "if len(self._lost)"),
    Mutant("router/evidence.py", "self._lost.add(miss.prefix)", "self._lost.add(miss.prefix + bytes([len(self._lost)]))"),
    Mutant("router/evidence.py", "            self.hit()  # of a part\n", "            pass\n"),
    Mutant("router/evidence.py", "            self._lost.clear()\n", ""),
    Mutant("router/evidence.py", "            self._losers.clear()\n", ""),
    Mutant("router/evidence.py", "        self.hits = False\n", ""),
    Mutant("router/evidence.py", "if miss.sent <= self.purged_at:", "if miss.sent < self.purged_at:"),
    Mutant("router/evidence.py", "if miss.sent <= self.purged_at:", "if False:"),
    Mutant("router/evidence.py", "                self._others_at = now\n", "                pass\n"),
    Mutant("router/evidence.py", "return now - self._others_at > window_s", "return True"),
    Mutant("router/evidence.py", "(alone or miss.client != self._shrunk_by)", "True"),
    Mutant("router/evidence.py", "max(younger, believed // 2)", "younger"),
    Mutant("router/evidence.py", "max(younger, self.capacity // 2)", "younger"),
    Mutant("router/evidence.py", "        elif younger < self.capacity:\n", "        else:\n"),
    Mutant("router/evidence.py", "        if not self.learns_capacity:\n            return False\n", ""),
    Mutant("router/evidence.py", "if now - self._minute > MEASURE_S:", "if False:"),
    Mutant("router/evidence.py", "if now - self._minute > MEASURE_S:", "if now - self._minute >= MEASURE_S:"),
    Mutant("router/evidence.py", "if idle_s <= self._longest_idle_s:", "if False:"),
    Mutant("router/evidence.py", "max(self.held, younger)", "younger"),
    Mutant("router/evidence.py", "if self.learns_capacity and (", "if ("),
    Mutant("router/evidence.py", "(miss.younger is None or miss.younger > self.held)", "True"),
    Mutant("router/evidence.py", "or miss.younger > self.held)", "or miss.younger >= self.held)"),
    Mutant("router/evidence.py", "(miss.younger is None or miss.younger > self.held)", "(miss.younger and miss.younger > self.held)"),
    Mutant("router/evidence.py", " and believed >= self.capacity:", ":"),
    Mutant("router/evidence.py", "int(self.capacity * GROWTH) + 1", "int(self.capacity * GROWTH)"),
    # policies
    Mutant("router/policies.py", "(key(candidate), chance.random())", "key(candidate)"),
    Mutant("router/policies.py", "self._taken[replica] = self._turn", "pass"),
    Mutant("router/policies.py", "shuffled[:2]", "shuffled[:3]"),
    Mutant("router/sticky.py", "prompt.session.encode", '"".encode'),
    Mutant("router/sticky.py", "[: HEAD_BLOCKS * KEY_BYTES]", ""),
    Mutant("router/sticky.py", "if key else chance.random()", ""),
    Mutant("router/sticky.py", "one.inflight >= room", "one.inflight > room"),
    Mutant("router/sticky.py", "math.ceil(", "int("),
    # the peers' rules
    Mutant("router/peers.py", "longest <= SGLANG_MATCH", "longest < SGLANG_MATCH"),
    Mutant("router/peers.py", "> SGLANG_MORE and max(loads)", "> SGLANG_MORE or max(loads)"),
    Mutant("router/peers.py", ">= LLM_D_AFFINITY * prompt.blocks > 0", "> LLM_D_AFFINITY * prompt.blocks > 0"),
    Mutant("router/peers.py", "> LLM_D_PENALTY_S", ">= LLM_D_PENALTY_S"),
    Mutant("router/peers.py", "_token_load(candidate) + candidate.active_tokens", "_token_load(candidate)"),
    Mutant("router/peers.py", "(candidate.inflight + 1)", "candidate.inflight"),
    # made-up workloads
    Mutant("router/generators.py", 'f"{self.tokens} {piece}"', 'f"{piece}"'),
    Mutant("router/generators.py", ".encode(), self.state)", ".encode(), 0)"),
    Mutant("router/generators.py", "if document not in taken:", "if True:"),
    # router
    Mutant("router/router.py", "        self._credit(booking)\n        return booking", "        return booking"),
    Mutant("router/router.py", "        self._take_back(booking)\n        booking.matched", "        booking.matched"),
    Mutant("router/router.py", "            self.ledger.remove(left)\n        self._credit(booking)", "            pass\n        self._credit(booking)"),
    Mutant("router/router.py", "            self.ledger.remove(left)\n        self._credit(booking)", "            self.ledger.remove(left)"),
    Mutant("router/router.py", "            self._take_back(booking)\n            return", "            return"),
    Mutant("router/router.py", "if not lease.close(now):", "if lease.close(now) is None:"),
    Mutant("router/router.py", "            self._settled(booking)\n            self.ledger.remove(name)\n", "            self._settled(booking)\n"),
    Mutant("router/router.py", "            self._settled(booking)\n            self.ledger.remove(name)\n", "            self.ledger.remove(name)\n"),
    Mutant("router/scales.py", "or not LEAST_UNITS / 2 <= units / tokens <= MOST_UNITS * 2", ""),
    Mutant("router/scales.py", "scale.near(plausible)", "plausible"),
    Mutant("router/scales.py", "min(max(units / tokens, LEAST_UNITS), MOST_UNITS)", "units / tokens"),
    Mutant("router/scales.py", "min(float(tokens), SCALE_HALF_LIFE_TOKENS)", "float(tokens)"),
    Mutant("router/scales.py", "                self._known.popitem(last=False)\n", "                pass\n"),
    Mutant("router/scales.py", "            self._known.move_to_end(name)\n", "            pass\n"),
    Mutant("router/router.py", "            self.trie.confirm(booking.lease.replica,", "            (booking.lease.replica,"),
    Mutant("router/router.py", "        self.confirm(booking, now)\n", "        pass\n"),
    Mutant("router/router.py", "        evidence.came(prompt.client, now)\n", "        pass\n"),
    Mutant("router/router.py", "        self.trie.pending_bytes -= booking.reserved\n", "        pass\n"),
    Mutant("router/router.py", "if tokens <= most:", "if True:"),
    Mutant("router/router.py", "now, confirmed=False)", "now)"),
    Mutant("router/booking.py", "        self._router.confirm(self, now)\n", "        pass\n"),
    Mutant("router/booking.py", "if self.lease.decoding or self.lease.closed:", "if False:"),
    Mutant("router/follow.py", "                router.confirm(booking, event[2])\n", "                pass\n"),
    Mutant("router/router.py", "int(capacity / block_tokens)", "capacity"),
    Mutant("router/router.py", "learns_capacity=capacity is None", "learns_capacity=True"),
    Mutant("router/router.py", "        if known is not None and known.capacity_tokens == capacity:\n            return\n", ""),
    Mutant("router/router.py", "            computed = tokens - cached\n", ""),
    Mutant("router/router.py", " and 0 <= cached <= tokens < MOST_TOKENS_PER_UNIT * prompt.units", ""),
    Mutant("router/router.py", "if tokens is not None and cached is not None and", "if tokens and"),
    Mutant("router/router.py", "            evidence.purged(self.trie.now)", "            pass"),
    Mutant("router/router.py", "lost = held + 1 < matched\n", "lost = False\n"),
    Mutant("router/router.py", "lost = held + 1 < matched\n", "lost = held < matched\n"),
    Mutant("router/router.py", "if held > matched + 1:", "if False:"),
    Mutant("router/router.py", "evidence.held_more(self.trie.held_by(name))", "evidence.held_more(10**9)"),
    Mutant("router/router.py", "            self.restarted(name)\n", "            pass\n"),
    Mutant("router/router.py", "            self.trie.add_replica(name, evidence.capacity)", "            pass"),
    Mutant("router/router.py", "younger, believed, cached == 0)", "younger, believed, True)"),
    Mutant("router/router.py", "        if cached:\n            evidence.hit()\n", "        if True:\n            evidence.hit()\n"),
    Mutant("router/router.py", "            evidence.hit()\n", "            pass\n"),
    Mutant("router/router.py", "                evidence.kept(self._younger(booking, since))", "                pass"),
    Mutant("router/router.py", "max(0, used - booking.prompt.blocks)", "used"),
    Mutant("router/router.py", "min(1.0, matched / TURN_TOKENS)", "1.0"),
    Mutant("router/router.py", "matched * 2 >= lease.prompt_tokens", "True"),
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
        own = Path("tests", "router", f"test_{path.stem}.py")  # most die of these
        return (not (ROOT / own).exists() or passes(str(own), folder)) and passes("tests/router", folder)


def passes(tests: str, folder: str) -> bool:
    command = [sys.executable, "-m", "pytest", tests, "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--timeout=120", "--hypothesis-profile=mutants"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False  # it loops for ever: noticed


def main() -> int:
    fate_is = {True: "SURVIVES", False: "dies", None: "STALE"}
    if not passes("tests/router", str(ROOT)):
        print("the tests fail without any mutant")
        return 1
    words = sys.argv[1:] or [""]
    chosen = [mutant for mutant in MUTANTS if any(word in mutant.file for word in words)]
    with ThreadPoolExecutor(2) as pool:
        fates = []
        for mutant, fate in zip(chosen, pool.map(survives, chosen), strict=True):
            fates.append(fate)
            print(f"{fate_is[fate]:<9} {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"\n{fates.count(False)} of {len(fates)} mutants die")
    return 0 if fates.count(False) == len(fates) else 1


if __name__ == "__main__":
    sys.exit(main())
