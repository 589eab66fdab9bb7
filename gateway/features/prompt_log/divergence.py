"""The error of a conversation that is not the expected one. If the expected log is kept here, it names the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gateway.admission.memory import MemoryLease
from gateway.dialects.prompt.batch import common_length
from gateway.errors import GatewayError
from gateway.features.prompt_log import job
from gateway.features.prompt_log.bases import Base, base_of, found_turns, log_error
from gateway.features.prompt_log.log_jobs import LogJobs, charge
from gateway.features.prompt_log.naming.chain import DIGEST, head_name
from gateway.features.prompt_log.naming.forms import LATEST
from gateway.parser.parsing import Parsing

if TYPE_CHECKING:
    from gateway.features.histories.turns import TurnStore

_TEXT: Final = (
    "The head of this conversation is not the one that the client expects ('expect'), so nothing was generated."
    " 'heads' has the heads after the last entries: the first one that differs from the client's own shows the entry."
)


def diverged(length: int, latest: Sequence[bytes], difference: dict[str, Any] | None = None) -> GatewayError:
    """length: entries of the log. latest: the chains after its last entries. difference: the first one, if it is known."""
    heads = [head_name(chain) for chain in latest[-LATEST:]]
    members = {} if difference is None else {"first_difference": difference}
    return log_error(409, "prompt_log_diverged", _TEXT, "expect", length=length, heads=heads, **members)


class Divergence:
    """Compares logs (see the module)."""

    def __init__(self, parsing: Parsing) -> None:
        self._jobs = LogJobs(parsing)

    async def first_difference(
        self, store: TurnStore, owner: str, expect: bytes, received: Base, form: str, lease: MemoryLease, max_bytes: int
    ) -> dict[str, Any] | None:
        """{index, path} of the first entry that differs; the path is "" if one log ends there. None: the expected log is not
        kept here, or cannot be read now. max_bytes: of the expected log.
        """
        try:
            turn = (await found_turns(store, owner, expect))[0]
            expected = await base_of(store, owner, turn, max_bytes)
            index = common_length(expected.digests, received.digests) // DIGEST
            if index >= min(expected.length, received.length):
                return {"index": index, "path": ""}
            pieces = [*expected.before, *received.before]
            charge(lease, 2 * sum(map(len, pieces)))
            sizes = [*map(len, expected.before), -1, *map(len, received.before)]
            forms, lengths = [turn.form, form], [expected.length, received.length]
            (path,) = await self._jobs.do(job.difference_at, pieces, lease.account.client, sizes, forms, lengths, index)
        except GatewayError:
            return None
        return {"index": index, "path": path}
