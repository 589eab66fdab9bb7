"""The router: one synchronous `choose` before a request, a few calls after it.

`choose` matches the prompt, prices the candidates, ranks them, books the best and credits it with the prompt's blocks, all in
one call without an await: two requests can never decide on the same stale state. The credit comes at booking, not at the
answer, so that a burst of similar prompts goes to one replica.

The credit is pending until the end of the answer: matched like any other, but it evicts nothing. Only the engine's count of
prompt tokens confirms it, and evicts blocks for it, because only the count shows how much of the prompt was computed. A client
may send fields that no template prints, and an engine may cut a prompt: if the count is far below the estimate, only as many
leading blocks are confirmed as it pays for. The others are taken back, or stay pending if an honest prompt may have so few
tokens: a text of long tokens, images (`_may_have`). Without a count (the engine reports none, the client has left) a credit
stays pending if the answer has shown a token. A prompt that the engine refuses, or answers with nothing, leaves no trace, and
the part beyond the replica's context (or its cache size, if the context is unknown) is not credited before the count.

The index is corrected by events: a failure removes a pending credit, a replica that leaves or restarts is purged, and the
engine's reported cached tokens reveal restarts and cache sizes (`evidence.py`). If less of a prompt was cached than predicted,
other prompts keep their entries: this prompt was computed and is held now, and it is weak evidence on others that share a part
of it (the engine may have rendered another prompt than the gateway).

Several routers may route for the same replicas: each keeps a journal of its bookings, which the others follow
(`replication_log.py`, `follower.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from typing import Final

from router.booking import Booking, Owner
from router.index.paid import PaidPrefixes
from router.index.trie import RadixTrie
from router.late import LEAST_S, TurnInLine, turn_of
from router.leading import lead_of
from router.learning.adapters import Adapters
from router.learning.allowances import Allowances, UncountedMemory
from router.learning.evidence import Evidence, Miss
from router.learning.inflight import InflightSharing
from router.learning.objects import Objects
from router.learning.promises import BUSY, GONE, HELD, LEAST_TOKENS, LOST, WAIT_S, Promises
from router.learning.scales import MAX_SCALES, MAX_UNITS, Scales
from router.learning.sessions import Session, Sessions
from router.learning.shares import CacheShares
from router.load import BookingLedger, Lease
from router.policies.least_cost import LeastCost
from router.policies.policy import Policies
from router.policies.table import POLICIES
from router.pricing.cost import START_S
from router.pricing.quotes import Quotes
from router.pricing.replication import Rents
from router.replication_log import Journal
from router.residency import Residency
from router.types import KEY_BYTES, TOKEN_WEIGHT, BlockKeys, Candidate, Decision, Outcome, Prompt, Random, Replica

MAX_TOKENS_PER_UNIT: Final = 100  # an image has few bytes of canonical text, and up to a thousand tokens
SHRINK_BYTES: Final = 1 << 18  # per sweep after the index bound was lowered: one large step would be a long pause
TURN_TOKENS: Final = 4096  # a match of this length counts fully for the gap between turns: short matches are coincidental
FAR_BELOW: Final = 2  # a count below the estimate by this factor credits the blocks that it pays for
WEIGHED_TOKENS: Final = 1000  # from this count on it sets the weight of a new path: the template adds much to a short prompt
PLENTY: Final = 4  # with 1 / PLENTY of its memory free, the index takes any credit without a count
LONG_S: Final = 1.0  # after a longer request its blocks are credited again, as used at its end


class Router(Owner):
    """Routes prompts (see the module). Time is an argument, chance comes through the constructor; no call blocks."""

    def __init__(
        self,
        *,
        policy: str,
        ttl_s: float,
        memory_bytes: int,
        chance: Random,
        journal: Journal | None = None,
        policies: Policies = POLICIES,
        promise_wait_s: float = WAIT_S,
    ) -> None:
        """policy: one of `policies`. journal: records local bookings, for other routers. promise_wait_s: maximum queue in
        seconds before a promised prefix (`learning/promises.py`).
        """
        self.journal = journal
        self.followers: list[Callable[[Booking], None]] = []  # called with each decision of another router
        self._doubted: Set[str] = frozenset()
        self.residency: Residency | None = None  # knows the reports of engines about their caches
        self.trie = RadixTrie(ttl_s, memory_bytes)
        self.ledger = BookingLedger()
        self.rents = Rents()
        self.sessions = Sessions()
        self.promises = Promises()
        self.objects = Objects()
        self.adapters = Adapters()
        self.promise_wait_s = promise_wait_s
        self.policy_name = policy
        self._policies = policies
        self._policy = policies[policy]()
        self._least_cost = self.ledger.has_lines = isinstance(self._policy, LeastCost)
        self._memory_bytes = memory_bytes
        self._chance = chance
        self._replicas: dict[str, Replica] = {}
        self._evidence: dict[str, Evidence] = {}
        self._allowances: dict[str, Allowances] = {}
        self._inflight: dict[str, InflightSharing] = {}  # of replicas that may not share prefixes in flight
        self._shares = CacheShares()  # of replicas with several caches
        self._uncounted = UncountedMemory()
        self._paid = PaidPrefixes(ttl_s, memory_bytes)
        self.scales = Scales()
        self._least_context = math.inf  # tokens: a lower bound of all replicas' context

    def retune(self, *, policy: str, ttl_s: float, memory_bytes: int) -> None:
        """Change policy and bounds. An unchanged policy keeps its state. O(1)."""
        if policy != self.policy_name:
            self.policy_name = policy
            self._policy = self._policies[policy]()
            self._least_cost = self.ledger.has_lines = isinstance(self._policy, LeastCost)
        self._memory_bytes = memory_bytes
        self.trie.ttl_s = self._paid.trie.ttl_s = ttl_s
        self.trie.resize(memory_bytes)
        self._paid.resize(memory_bytes)

    def sweep(self, now: float) -> bool:
        """Drop a slice of expired entries, and shrink a step towards a lowered memory bound.

        To be called once a second. True if there may be more to do: call it again soon.
        """
        if self.ledger.starting:
            self.ledger.forget_starts(now - START_S)
        more = self.trie.resize(self._memory_bytes, SHRINK_BYTES) or self._paid.resize(self._memory_bytes, SHRINK_BYTES)
        more = self._paid.trie.sweep(now) or more
        return self.trie.sweep(now) or more

    # -- replicas

    def add(self, replica: Replica) -> None:
        """A replica joined, or its bounds changed.

        O(1), or O(replicas) if the replica with the shortest context now accepts longer prompts.
        """
        known, capacity = self._replicas.get(replica.name), replica.capacity_tokens
        if known is None:
            self._allowances[replica.name] = Allowances()
        self._replicas[replica.name] = replica
        self._know_sharing(replica)
        self._shares.set(replica.name, replica.caches)
        self.adapters.add(replica.name, replica.adapters)
        self.ledger.rates.add(replica.name, replica.pool)
        if known is not None and _context_of(known) <= self._least_context < _context_of(replica):
            self._least_context = min(map(_context_of, self._replicas.values()))
        else:
            self._least_context = min(self._least_context, _context_of(replica))
        if known is not None and known.capacity_tokens == capacity:
            return
        self._evidence[replica.name] = Evidence(learns_capacity=capacity is None)
        self.trie.add_replica(replica.name, None if capacity is None else capacity * TOKEN_WEIGHT)

    def remove(self, name: str) -> None:
        """A replica left: remove its index entries and learned values. Its open leases still close."""
        self._record_loss(name)
        self._replicas.pop(name, None)
        self._evidence.pop(name, None)
        self._allowances.pop(name, None)
        self._forget(name)
        self._inflight.pop(name, None)
        self._shares.forget(name)
        self.adapters.remove(name)
        self.trie.remove_replica(name)
        self._paid.remove_replica(name)
        self.scales.forget(name)
        self.ledger.starting.pop(name, None)
        self.ledger.remove(name)

    def came_up(self, name: str, now: float) -> None:
        """A replica came up, or joined: it gets less new work for START_S (`pricing/cost.py`)."""
        self.ledger.starting[name] = now

    def restarted(self, name: str) -> None:
        """A replica lost its cache."""
        self._record_loss(name)
        self.purge(name)

    def reported(self, name: str, running: int, waiting: int, own: int, now: float) -> None:
        """The engine of a replica has reported its requests. own: the most sequences that were sent there meanwhile
        (`ReplicaLoad.sent_sequences`), by all routers that share. What exceeds them is the load of others.
        """
        if name in self._replicas:
            self.ledger.reported(name, running, waiting, own, now)

    def failing(self, name: str) -> None:
        """A replica has failed: the owners of other routers should check it."""
        if self.journal:
            self.journal.failing(name)

    def purge(self, name: str) -> None:
        """A replica lost its cache, as observed by this or another router. Not recorded in the journal."""
        self.trie.purge(name)
        self._forget(name)
        if evidence := self._evidence.get(name):
            evidence.purged(self.trie.now)

    def _forget(self, name: str) -> None:
        """Forget the learned state outside the index of a replica that has lost its cache."""
        self.sessions.lost(name, self.trie.now, self.trie.ttl_s)
        self.promises.lost(name, self.trie.now)
        self.adapters.lose(name)
        if name in self._inflight:
            self._inflight[name].forget()
        if (load := self.ledger.loads.get(name)) is not None:
            load.serial.forget()
            load.end_line()

    def _know_sharing(self, replica: Replica) -> None:
        """Keep the evidence about a replica's sharing in flight, unless its engine is another one."""
        known, slots = replica.shares_inflight, replica.slots
        if known:
            self._inflight.pop(replica.name, None)
        elif (before := self._inflight.get(replica.name)) is None or before.kind != (known, slots):
            self._inflight[replica.name] = InflightSharing(known=known, slots=slots)

    def doubt(self, names: Set[str]) -> None:
        """From now on nothing is learned from counts and times of these replicas, and they have the rates of their pools."""
        for name in names - self._doubted:
            self.ledger.rates.of(name).forget()
        self._doubted = names

    def known(self, name: str) -> Replica | None:
        """The replica of this name, if there is one here."""
        return self._replicas.get(name)

    def evidence_of(self, name: str) -> Evidence | None:
        """The evidence about a replica's cache; None: there is no such replica."""
        return self._evidence.get(name)

    def purged_at(self, name: str) -> float:
        """Time at which a replica last lost its cache, as far as known; blocks used before are not held."""
        evidence = self._evidence.get(name)
        return evidence.purged_at if evidence else math.inf

    def learned_capacity(self, name: str) -> int | None:
        """The learned capacity of a replica in tokens, rounded up; None if it is configured or unknown."""
        evidence = self._evidence.get(name)
        return -(-evidence.capacity // TOKEN_WEIGHT) if evidence and evidence.capacity is not None else None

    def held_tokens(self, name: str) -> int:
        """Tokens that a replica is believed to hold, including expired blocks that are not dropped yet. O(1)."""
        return self.trie.weight_held_by(name) // TOKEN_WEIGHT

    # -- before a request

    def units_per_token(self, scale: str) -> float:
        """The learned scale of a model; 1 if a unit is a token."""
        return self.scales.units_per_token(scale)

    def shares_inflight(self, name: str) -> bool | None:
        """True if a replica shares a prefix that it is still computing; False: it computes it again; None: not known yet."""
        inflight = self._inflight.get(name)
        return inflight.shares if inflight is not None else True if name in self._replicas else None

    def has_slots(self, name: str) -> bool:
        """True if a replica finds a prefix only when its request has ended: its engine's kind says it, or it is learned."""
        inflight = self._inflight.get(name)
        return inflight is not None and inflight.slots

    def holder(self, prompt: Prompt, replicas: Collection[str], now: float) -> str:
        """The one of these replicas that is believed to hold most of the prompt; "" without one, or if several hold as much.

        O(edges on the prompt's path x replicas).
        """
        matched = self.trie.matched(replicas, prompt.keys, now)
        longest = max(matched.values(), default=0)
        holders = [name for name, blocks in matched.items() if blocks == longest]
        return holders[0] if len(holders) == 1 else ""

    def rank(self, prompt: Prompt, replicas: Collection[str], now: float) -> tuple[Decision, list[Candidate]]:
        """The decision of `choose` without booking, and all candidates, best first. `replicas`: not empty.

        O(edges on the prompt's path x their holders + replicas log replicas).
        """
        return self._ranked(self._quotes(prompt, replicas, now))

    def choose(self, prompt: Prompt, replicas: Collection[str], now: float, *, silent: bool = False) -> Booking:
        """Book the best and credit it with the prompt. Raises ValueError without candidates.

        silent: the answer is not streamed, or its first token does not show the duration of the prefill.
        """
        quotes = self._quotes(prompt, replicas, now)
        decision = self._decide(quotes)
        best = decision.best
        lease = self.ledger.open(best.replica, decision.prompt_tokens, best.uncached_tokens, now, silent=silent)
        booking = Booking(self, prompt, lease, best.matched_blocks, quotes.block_weight)
        booking.decision = decision
        booking.unseen = quotes.unseen.get(best.replica, 0)
        booking.sent_blocks = quotes.sent.get(best.replica, 0)
        if prompt.adapter:
            booking.loads = self.adapters.open(best.replica, prompt.adapter)
        if lease.ahead is not None and best.matched_blocks:
            self._follow(booking, now)
        if booking.lead is None:
            self._line_up(booking, now)
        if self.journal:
            self.journal.opened(booking)
        return booking

    def book(self, prompt: Prompt, lease: Lease, matched_blocks: int, unseen: int) -> Booking:
        """Book another router's decision. Not recorded in the journal."""
        booking = Booking(self, prompt, lease, matched_blocks, prompt.block_weight(self.units_per_token(prompt.scale)))
        booking.unseen = unseen
        if prompt.adapter:
            booking.loads = self.adapters.open(lease.replica, prompt.adapter)
        self._credit(booking)
        for followed in self.followers:
            followed(booking)
        return booking

    # -- after a request

    def first_token(self, booking: Booking, now: float) -> None:
        """See Booking.first_token."""
        if self.journal:
            self.journal.first_token(booking, now)
        self.computed(booking, now)

    def computed(self, booking: Booking, now: float) -> None:
        """A booking of this or another router has its first token."""
        booking.lease.first_token(now)
        if booking.prompt.adapter:
            self.adapters.use(booking.lease.replica, booking.prompt.adapter)

    def move(self, booking: Booking, replicas: Collection[str], now: float) -> None:
        """See Booking.move."""
        booking.lease.withdraw(now)
        quotes = self._quotes_again(booking, replicas, now)
        booking.decision = decision = self._decide(quotes)
        best = decision.best
        booking.unseen = quotes.unseen.get(best.replica, 0)
        self._rebook(booking, best.replica, best.matched_blocks, decision.prompt_tokens, best.uncached_tokens, now)
        booking.sent_blocks = quotes.sent.get(best.replica, 0)
        if booking.lease.ahead is not None and best.matched_blocks:
            self._follow(booking, now)
        if booking.lead is None:
            self._line_up(booking, now)
        if self.journal:
            self.journal.moved(booking)

    def rebook(
        self, booking: Booking, replica: str, matched_blocks: int, prompt_tokens: int, uncached_tokens: int, now: float
    ) -> None:
        """An open booking moves to a replica, by another router's decision."""
        self._rebook(booking, replica, matched_blocks, prompt_tokens, uncached_tokens, now)
        self._credit(booking)

    def _rebook(
        self, booking: Booking, replica: str, matched_blocks: int, prompt_tokens: int, uncached_tokens: int, now: float
    ) -> None:
        left = booking.lease.replica
        self._take_back(booking)
        booking.lead = booking.beside = None
        booking.matched_blocks = booking.sent_blocks = matched_blocks
        booking.lease.move(replica, prompt_tokens, uncached_tokens, now)
        if adapter := booking.prompt.adapter:
            self.adapters.end(left, adapter, used=False)
            booking.loads = self.adapters.open(replica, adapter)
        if left not in self._replicas:
            self.ledger.remove(left)

    def release(self, booking: Booking, now: float) -> bool:
        """See Booking.release."""
        lead, booking.lead = booking.lead, None
        if isinstance(lead, TurnInLine):
            booking.lease.release(now)
            if booking.lease.since == now and not lead.over:  # it does not wait, after a failure
                booking.lease.load.overtake(booking.lease)
            if booking.lease.replica not in self._replicas or self._lost_match_s(booking, now) > LEAST_S:
                return True
            self._credit(booking)
            return False
        lost = lead is not None and (lead.lost or booking.lease.replica not in self._replicas)
        if lead is not None and lead.computed and not lead.after_s:
            lead.awaited, booking.beside = True, lead  # the cached tokens will show if it was found
        booking.lease.release(now)
        if not lost:
            booking.lease.load.overtake(booking.lease)
            self._credit(booking)
        return lost

    def close(self, booking: Booking, outcome: Outcome, now: float) -> bool:
        """See Booking.close."""
        if self.journal and not booking.lease.closed:
            self.journal.closed(booking, outcome, now)
        return self.observe(booking, outcome, now)

    def observe(self, booking: Booking, outcome: Outcome, now: float) -> bool:
        """Close a booking of this or another router. The engine's counts are checked before use."""
        prompt, lease = booking.prompt, booking.lease
        if not lease.close(now):
            return False
        name, since = lease.replica, lease.since
        if prompt.adapter:
            self.adapters.end(name, prompt.adapter, used=outcome.ok and outcome.shown)
        doubted = bool(self._doubted) and name in self._doubted
        if doubted:
            outcome, lease.prefill_s = outcome.uncounted(), None
        evidence = self._evidence.get(name)
        if evidence is None:
            self._clear_pending(booking)
            self.ledger.remove(name)
            return False
        tokens, cached = outcome.prompt_tokens, outcome.cached_tokens
        if tokens is not None and not 0 < tokens < MAX_TOKENS_PER_UNIT * prompt.units:
            tokens = cached = None
        if not (outcome.ok and outcome.shown):
            self._take_back(booking, wholly=outcome.ok and doubted)
            return False
        lease.load.computed_at = now
        keys, whole = self._settle(booking, tokens, now)
        counted = tokens is not None
        if outcome.cached_tokens is None and keys:
            self._paid.add(name, prompt, keys, now)
        evidence.answered(prompt.origin, now, reports=outcome.cached_tokens is not None if counted else None)
        tokens = tokens if outcome.countable else None
        if tokens is None or cached is None or not 0 <= cached <= tokens:
            cached = None
        restarted = self._learn_counts(booking, evidence, keys, tokens, cached, now)
        if prompt.session_key:
            self._learn_session(booking, cached)
            units = prompt.units if whole else len(keys) // KEY_BYTES * prompt.block_units
            self.sessions.answered(prompt.session_key, name, units, now)
        if prompt.breakpoints and whole:
            self.promises.make(prompt, self._promisable(prompt), name, now)
        if counted and (now - since > LONG_S or evidence.purged_at >= since):
            self.trie.insert(name, keys, now, weight=booking.weight)
        return restarted

    def paid_tokens(self, booking: Booking) -> int:
        """See Booking.paid_tokens."""
        best = booking.decision.best
        if not best.matched_blocks:
            return 0
        paid = self._paid.blocks(best.replica, booking.prompt, self.trie.now)
        return best.matched_tokens * min(paid, best.matched_blocks) // best.matched_blocks

    def reservable_tokens(self, booking: Booking) -> int:
        """See Booking.reservable_tokens."""
        best = booking.decision.best
        evidence = self._evidence.get(best.replica)
        return self.paid_tokens(booking) if evidence is not None and evidence.reports is False else best.matched_tokens

    def stored(self, number: int, replica: str, model: str, now: float) -> None:
        """A replica stores an object of this number, for later requests that name it."""
        if self.journal:
            self.journal.stored(number, replica, model, now)
        self.objects.put(number, replica, model, now)

    # -- deciding

    def _quotes(self, prompt: Prompt, replicas: Collection[str], now: float) -> Quotes:
        """The quotes of a prompt. Raises ValueError without candidates."""
        if not replicas:
            raise ValueError("no replica to choose from")
        quotes = Quotes(self.trie, self.ledger, prompt, self.units_per_token(prompt.scale), replicas, now, self._shares)
        if prompt.tokens is not None and self.residency is not None:
            quotes.know(self.residency, prompt.tokens)
        quotes.discount(self.rents)
        if prompt.adapter:
            quotes.price_adapters(self.adapters)
        if prompt.session_key:
            sessions = self.sessions
            if session := sessions.find(prompt.session_key):
                self._expect(quotes, session, sessions.share(session, prompt.origin))
            elif prompt.parent_key and (parent := sessions.find(prompt.parent_key)):
                self._expect(quotes, parent, sessions.kin.value(prompt.origin))
        return quotes

    def _quotes_again(self, booking: Booking, replicas: Collection[str], now: float) -> Quotes:
        """The quotes of a booked prompt, of which its own lease computes nothing."""
        booking.lease.keys = b""
        quotes = self._quotes(booking.prompt, replicas, now)
        booking.lease.keys = booking.prompt.keys
        return quotes

    def _expect(self, quotes: Quotes, session: Session, share: float) -> None:
        scale = self.units_per_token(quotes.prompt.scale)
        quotes.expect(self.sessions, session, share, quotes.now - self.trie.ttl_s, scale)

    def _ranked(self, quotes: Quotes) -> tuple[Decision, list[Candidate]]:
        ranking = self._policy.order(quotes.prompt, quotes.candidates(), self._chance)
        decision = quotes.decision(ranking[0])
        if quotes.prompt.breakpoints and self._least_cost:
            decision = self._keep_promise(quotes, decision)
            ranking.sort(key=lambda candidate: candidate.replica != decision.best.replica)
        return decision, ranking

    def _decide(self, quotes: Quotes) -> Decision:
        if not self._least_cost:
            return self._ranked(quotes)[0]
        best, idle = quotes.cheapest(self._chance)
        if best.matched_blocks < quotes.longest:
            self._rent(quotes.shared_prefix, None)
        elif idle and best.cost.queue_s > 0 and (rent_s := quotes.rent_of(best)) > 0:
            self._rent(quotes.shared_prefix, rent_s)
        decision = quotes.decision(best)
        return self._keep_promise(quotes, decision) if quotes.prompt.breakpoints else decision

    def _keep_promise(self, quotes: Quotes, decision: Decision) -> Decision:
        """The decision, or another one for the replica that keeps a promised prefix."""
        prompt = quotes.prompt
        promise = self.promises.find(prompt, self._promisable(prompt), quotes.now)
        if promise is None:
            return decision
        name, outcome = promise.replica, HELD
        if self.promises.is_lost(promise):
            outcome = LOST
        elif name not in quotes.replicas:
            outcome = GONE
        elif name != decision.best.replica:
            holder = quotes.candidate(name)
            if holder.cost.queue_s <= self.promise_wait_s:
                decision = quotes.decision(holder)
            else:
                outcome = BUSY
        decision.promise, decision.promised_tokens = outcome, quotes.tokens(promise.blocks)
        return decision

    def _promisable(self, prompt: Prompt) -> int:
        """The blocks of the shortest prefix of this prompt that is worth a promise."""
        return max(1, math.ceil(LEAST_TOKENS * self.units_per_token(prompt.scale) / prompt.block_units))

    def _rent(self, prefix: bytes, seconds: float | None) -> None:
        if self.journal:
            self.journal.rent(prefix, seconds)
        self.rents.record(prefix, seconds)

    def _credit(self, booking: Booking) -> None:
        """A booking is sent: credit its replica with its prompt."""
        lease = booking.lease
        lease.pass_waiting()
        name, now = lease.replica, lease.sent
        if not self._least_cost:  # that policy stores nothing
            self._policy.booked(name)
        keys = self._creditable(booking)
        new = len(keys) // KEY_BYTES - booking.matched_blocks
        if new > 0:
            self._back(booking, new)
        booking.idle_s = idle_s = self.trie.insert(name, keys, now, weight=booking.weight, confirmed=False)
        booking.pending, booking.tail, booking.reserved = True, self.trie.tail, self.trie.reserved
        matched = max(0, lease.prompt_tokens - lease.uncached_tokens)  # another router's numbers may be of two moments
        next_turn = idle_s is not None and matched * 2 >= lease.prompt_tokens
        lease.load.rate.pool.conversation.sent(begins=not next_turn)
        if idle_s is not None:
            self.ledger.record_return(lease.load, idle_s, min(1.0, matched / TURN_TOKENS), next_turn, now)

    def _line_up(self, booking: Booking, now: float) -> None:
        """The booking's place in the line of its replica, or its credit if it is sent at once."""
        lease = booking.lease
        if lease.ahead is not None and self._least_cost:
            booking.lead = turn_of(lease, now)
        if booking.lead is None:
            self._credit(booking)

    def _lost_match_s(self, booking: Booking, now: float) -> float:
        """The prefill of what the replica has evicted of the booking's match during its wait. O(edges on the prompt's path)."""
        prompt, lease = booking.prompt, booking.lease
        held = self._quotes_again(booking, [lease.replica], now).matched.get(lease.replica, 0)
        tokens = (booking.matched_blocks - held) * prompt.block_units / self.units_per_token(prompt.scale)
        return tokens / lease.load.rate.value

    def _follow(self, booking: Booking, now: float) -> None:
        """Set the lease that computes a part of the booking's match: to wait for it, or to learn from it. O(1)."""
        lease, best = booking.lease, booking.decision.best
        inflight = self._inflight.get(lease.replica)
        if inflight is None:
            return
        end = best.matched_blocks * KEY_BYTES
        prefix = booking.prompt.keys[end - KEY_BYTES : end]
        lead = lead_of(lease, prefix, end, best.matched_tokens, now, slots=inflight.slots)
        if lead is not None and inflight.shares is False:
            booking.lead = lead
            lease.follow(lead.lease)
        else:
            booking.beside = lead

    def _learn_sharing(self, booking: Booking, cached: int) -> None:
        """Learn how much of a prefix was found that another request computed when this one was sent, or just before, once the
        replica has reported a hit. cached: as reported.
        """
        lead, inflight = booking.beside, self._inflight.get(booking.lease.replica)
        evidence = self._evidence[booking.lease.replica]
        if lead is not None and inflight is not None and lead.computed and not lead.lease.silent and evidence.hits:
            before = booking.decision.best.matched_tokens - lead.tokens
            inflight.learn(lead.tokens, min(max(0, cached - before), lead.tokens), awaited=lead.awaited)

    def _creditable(self, booking: Booking) -> BlockKeys:
        """The keys of the part of the prompt that the booking's replica can hold, by the estimated tokens."""
        prompt, tokens = booking.prompt, booking.lease.prompt_tokens
        if tokens <= self._least_context:
            return prompt.keys
        most = _context_of(self._replicas.get(booking.lease.replica))
        if tokens <= most:
            return prompt.keys
        return prompt.keys[: int(most * self.units_per_token(prompt.scale) / prompt.block_units) * KEY_BYTES]

    def _record_loss(self, name: str) -> None:
        """Record the loss of a cache, before the replica's entries are removed."""
        if self.journal and self.trie.held_by(name):
            self.journal.cache_lost(name)

    # -- learning

    def _settle(self, booking: Booking, count: int | None, now: float) -> tuple[BlockKeys, bool]:
        """The end of a good answer: credit the replica with the booking's prompt as far as the engine has counted it.

        Returns the keys of the blocks that the count confirms (all that are credited, without a count), and True if the whole
        prompt is credited.
        """
        prompt, name, trie = booking.prompt, booking.lease.replica, self.trie
        if not prompt.keys:
            return prompt.keys, True
        if self._has_one_conversation(name):  # that of the last request; the count may be of new tokens only
            self._clear_pending(booking)
            self.purge(name)
            trie.insert(name, prompt.keys, now, weight=booking.weight)
            return prompt.keys, True
        if count is None:
            if not self._admit_uncounted(booking, now):
                self._take_back(booking)
                return b"", False
            self._clear_pending(booking)
            return prompt.keys, True
        keep, known, whole = prompt.blocks, min(booking.matched_blocks, prompt.blocks), True
        weight = booking.tail.node.weight if booking.tail is not None else trie.weight_of(prompt.keys, booking.weight)
        paid, estimate = count * TOKEN_WEIGHT, weight * prompt.units // prompt.block_units
        far_below = paid * FAR_BELOW < estimate
        honest = not far_below or _may_have(prompt, count)
        if not known and honest and (far_below or count >= WEIGHED_TOKENS):
            counted = paid * prompt.block_units // prompt.units
            least = weight // FAR_BELOW
            if far_below:
                least = min(least, int(prompt.block_units * TOKEN_WEIGHT / MAX_UNITS))
            trie.weigh(name, prompt.keys, max(least, min(counted, weight * FAR_BELOW), 1))
        if far_below:
            keep = min(keep, paid // trie.weight_of(prompt.keys, weight))
            whole = keep == prompt.blocks or (honest and self._admit_uncounted(booking, now))
            if not whole:
                trie.take_back(name, prompt.keys, keep)
        keys = prompt.keys if keep == prompt.blocks else prompt.keys[: keep * KEY_BYTES]
        self._confirm(booking, keys, now)
        if keep > known:
            self._allowances[name].count(prompt.origin, (keep - known) * weight, trie.capacity_of(name), now, trie.ttl_s)
        return keys, whole

    def _admit_uncounted(self, booking: Booking, now: float) -> bool:
        """Admit a credit without a count, while memory is short into its client's share. False: that share is used up."""
        trie, most = self.trie, self.trie.max_bytes
        if trie.size_bytes <= most - most // PLENTY:
            return True
        return self._uncounted.admit(booking.prompt.origin, booking.reserved, most, now, trie.ttl_s)

    def _confirm(self, booking: Booking, keys: BlockKeys, now: float) -> None:
        """The replica holds these leading blocks of the booking's prompt: evict others for them."""
        tail = booking.tail
        self._clear_pending(booking)
        self.trie.confirm(booking.lease.replica, keys, now, tail, weight=booking.weight)

    def _has_one_conversation(self, name: str) -> bool:
        replica = self._replicas.get(name)
        return replica is not None and replica.one_conversation

    def _back(self, booking: Booking, blocks: int) -> None:
        """Reserve the weight of the booking's new blocks of its client's allowance."""
        lease, trie = booking.lease, self.trie
        allowances = self._allowances.get(lease.replica)
        if allowances is None:
            return
        weight = blocks * trie.weight_of(booking.prompt.keys, booking.weight)
        if allowances.reserve(booking.prompt.origin, weight, lease.since, trie.ttl_s):
            booking.allowances, booking.backed = allowances, weight
            trie.back(lease.replica, allowances.reserved)

    def _take_back(self, booking: Booking, *, wholly: bool = False) -> None:
        """Remove a pending credit: the replica computed nothing of the prompt beyond its match. wholly: it seems to compute
        nothing of any prompt. Remove its match, too, so that the conversation goes elsewhere.
        """
        if booking.pending:
            self._clear_pending(booking)
            keep = 0 if wholly else booking.matched_blocks
            self.trie.take_back(booking.lease.replica, booking.prompt.keys, keep, confirmed=wholly)

    def _clear_pending(self, booking: Booking) -> None:
        """End the pending state of the booking's credit."""
        if (allowances := booking.allowances) is not None:
            name = booking.lease.replica
            allowances.release(booking.prompt.origin, booking.backed)
            booking.allowances, booking.backed = None, 0
            if self._allowances.get(name) is allowances:
                self.trie.back(name, allowances.reserved)
        self.trie.pending_bytes -= booking.reserved
        booking.pending, booking.tail, booking.reserved = False, None, 0

    def _learn_counts(
        self, booking: Booking, evidence: Evidence, keys: BlockKeys, tokens: int | None, cached: int | None, now: float
    ) -> bool:
        """Learn from the engine's counts of prompt tokens and cached tokens. True if it had lost its cache."""
        prompt, lease = booking.prompt, booking.lease
        restarted, computed = False, lease.uncached_tokens
        if tokens is not None:
            if not prompt.images:
                self.scales.learn(prompt.scale, prompt.units, tokens, prompt.origin, lease.replica)
            computed = min(computed, tokens)
            if cached is not None:
                computed = tokens - cached
                if booking.beside is not None:
                    self._learn_sharing(booking, cached)
                restarted = self._believe(booking, evidence, keys, tokens, cached, now)
        if lease.prefill_s is not None:  # with the engine's computed tokens, if it reports them; else with the estimate
            self._learn_speed(booking, computed, lease.prefill_s)
        return restarted

    def _learn_speed(self, booking: Booking, computed: int, seconds: float) -> None:
        """Learn from the time to a first token. computed: tokens."""
        lease, rate = booking.lease, booking.lease.load.rate
        if lease.remote and lease.queued and self.has_slots(lease.replica):
            return  # its router may have held it back until its lead had ended
        if booking.loads:
            if rate.pool.known:
                self.adapters.load.learn(booking.prompt.origin, seconds - computed / rate.value)
            return
        rate.learn(computed, seconds)
        if lease.queued:
            lease.load.serial.learn(computed, seconds, rate.value)

    def _learn_session(self, booking: Booking, cached: int | None) -> None:
        """Learn the share of the session that the replica had beyond the match. cached: tokens, as reported."""
        prompt, blocks, scale = booking.prompt, booking.matched_blocks, self.units_per_token(booking.prompt.scale)
        matched, unseen = blocks * prompt.block_units / scale, booking.unseen / scale
        if not booking.unseen:
            self.sessions.matched(prompt.session_key, prompt.units, blocks, prompt.block_units, int(matched))
        elif cached is not None:
            found = min(max(0.0, cached - matched), unseen)
            if prompt.parent_key and self.sessions.find(prompt.session_key) is None:
                self.sessions.kin.learn(prompt.origin, unseen, found)
            else:
                self.sessions.learn(prompt.session_key, prompt.origin, unseen, found)

    def _believe(self, booking: Booking, evidence: Evidence, keys: BlockKeys, tokens: int, cached: int, now: float) -> bool:
        """Learn from the engine's reported cached tokens. keys: of the computed blocks. True if it had lost its cache."""
        prompt, lease, matched, known = booking.prompt, booking.lease, booking.matched_blocks, evidence.capacity
        name = lease.replica
        held = int(cached * self.units_per_token(prompt.scale) / prompt.block_units)
        if self._shares and self._shares.get(name) is not None:
            if booking.sent_blocks and booking.beside is None:
                believed = tokens * min(1.0, booking.sent_blocks * prompt.block_units / prompt.units)
                self._shares.learn(name, prompt.origin, believed, min(cached, believed))
            return False
        # Tolerance of one block: tokens are an estimate, and an engine's blocks end at other places.
        # A part that another request computed meanwhile says nothing about the cache.
        lost = held + 1 < matched and booking.beside is None
        if lost and cached:  # unless its tokens are longer than in other prompts
            lost = not prompt.images and cached * prompt.units < (matched - 1) * prompt.block_units * tokens
        if held > matched + 1:
            evidence.held_more(self.trie.weight_held_by(name), self._block_weight(booking))
            if held > 2 * matched + 2 and evidence.was_inferred(lease.since, self.trie.ttl_s):
                self._shares.contradicted(name)
        restarted = booking.idle_s is not None and self._weigh(booking, evidence, booking.idle_s, cached, lost, now)
        if restarted:  # other routers infer it from the same counts
            self.purge(name)
            evidence.inferred_at = self.trie.now
        if evidence.capacity != known:
            self.trie.add_replica(name, evidence.capacity)
        elif not (restarted or lost):
            return False
        self.trie.insert(name, keys, now, weight=booking.weight)
        return restarted

    def _weigh(self, booking: Booking, evidence: Evidence, idle_s: float, cached: int, lost: bool, now: float) -> bool:
        """Use a warm prefix that returned after idle_s as evidence. True if the replica had lost its cache."""
        prompt, lease = booking.prompt, booking.lease
        since = lease.since - idle_s
        if lost:
            end, believed = booking.matched_blocks * KEY_BYTES, self.trie.weight_held_by(lease.replica)
            younger = self._younger(booking, since, confirmed=False) if evidence.learns_capacity else None
            miss = Miss(prompt.origin, prompt.keys[end - KEY_BYTES : end], lease.since, younger, believed, cached == 0)
            return evidence.lost(miss, evidence.single_client(now, self.trie.ttl_s))
        if cached:
            evidence.hit()
            if evidence.worth_measuring(idle_s, now):
                evidence.kept(self._younger(booking, since, confirmed=True))
        return False

    def _younger(self, booking: Booking, since: float, *, confirmed: bool) -> int | None:
        """Weight of the replica's blocks used after `since`, or of the confirmed ones, without the prompt's own; None if too
        many to count.
        """
        used = self.trie.used_since(booking.lease.replica, since, confirmed=confirmed)
        return None if used is None else max(0, used - booking.prompt.blocks * self._block_weight(booking))

    def _block_weight(self, booking: Booking) -> int:
        """The present weight of a block of the booking's prompt in the index."""
        return self.trie.weight_of(booking.prompt.keys, booking.weight)

    # -- for metrics and tests

    @property
    def replicas(self) -> Mapping[str, Replica]:
        return self._replicas

    def check(self) -> None:
        """Raises AssertionError if an invariant of any part is broken. O(everything)."""
        self.trie.check()
        self.ledger.check()
        self.sessions.check()
        self.promises.check()
        self.objects.check()
        self.adapters.check()
        assert len(self.scales) <= MAX_SCALES
        assert self.trie.pending_bytes >= 0
        assert set(self.trie.held()) == set(self._replicas) == set(self._evidence) == set(self._allowances)
        for allowances in self._allowances.values():
            allowances.check()
        self._uncounted.clients.check()
        self._paid.check()

    def __repr__(self) -> str:
        return f"<Router {self.policy_name}, {self.ledger!r}, {self.trie!r}>"


def _may_have(prompt: Prompt, tokens: int) -> bool:
    """True if an honest prompt of these units may have so few tokens."""
    return prompt.images > 0 or (prompt.scale != "" and prompt.units <= MAX_UNITS * tokens)


def _context_of(replica: Replica | None) -> float:
    """The tokens of the longest prompt that a replica can hold, as far as known."""
    return (replica and (replica.context_tokens or replica.capacity_tokens)) or math.inf
