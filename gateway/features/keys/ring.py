"""The known keys, indexed by the SHA-256 of each secret. A request costs one look-up.

    credentials ── sha256 ──► digest ──► (grant, until)

Invariants: each digest belongs to one key. A revocation also applies to waiting requests, which hold the earlier grant; other
changes apply to later requests only. The ring stores digests only, so the duration of a look-up reveals nothing about the bytes
of a guess.
"""

from __future__ import annotations

from typing import Final

from gateway.features.keys.grant import Grant

MAX_KEYS: Final = 100_000

Digests = tuple[tuple[bytes, float], ...]


class KeyRing:
    """Times are Unix seconds. until: when a digest stops being valid, 0: never."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[Grant, float]] = {}
        self._by_id: dict[str, tuple[Grant, Digests]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, digest: bytes, now: float) -> Grant | None:
        """The grant of a key, also of a revoked or expired one. None for unknown digests and for secrets whose grace after a
        rotation has ended. O(1).
        """
        found = self._by_digest.get(digest)
        if found is None or (found[1] and now >= found[1]):
            return None
        return found[0]

    def grant(self, id_: str) -> Grant | None:
        """O(1)."""
        found = self._by_id.get(id_)
        return found[0] if found else None

    def put(self, grant: Grant, digests: Digests) -> None:
        """Adds a key, or replaces it. O(digests)."""
        self._drop(grant.id, revoked=grant.revoked)
        self._by_id[grant.id] = grant, digests
        for digest, until in digests:
            self._by_digest[digest] = grant, until

    def retain(self, ids: set[str]) -> None:
        """Revokes and removes all other keys. O(keys)."""
        for id_ in [id_ for id_ in self._by_id if id_ not in ids]:
            self._drop(id_, revoked=True)

    def _drop(self, id_: str, *, revoked: bool) -> None:
        before = self._by_id.pop(id_, None)
        if before is None:
            return
        before[0].revoked = revoked
        for digest, _ in before[1]:
            found = self._by_digest.get(digest)
            if found is not None and found[0] is before[0]:
                del self._by_digest[digest]

    def check(self) -> None:
        """O(keys)."""
        known = {digest: (grant, until) for grant, digests in self._by_id.values() for digest, until in digests}
        assert self._by_digest == known

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._by_id)} keys>"
