"""The claims of one answer, beside what the gateway knows of its request."""

from __future__ import annotations

from gateway.dialects.usage import Usage
from router.types import BlockKeys


class AnswerClaim:
    """One complete answer of a metered generation about one prompt. Immutable by convention.

    client: a number of the client: of its tenant with keys, else of its address. keys, units: of its canonical prompt;
    block_units: of one block. scale: the name of the model's tokenizer, "" if a unit is a token. size: of the whole request, at
    least that of the prompt. images: in the prompt. sent: tokens of it that the replica can have seen before; None: unknown.
    usage: as the engine reported it, None without a report. passed: tokens of its stream, None for a plain answer. prefill_s,
    decode_s: durations, None if the answer does not show them.
    """

    __slots__ = (
        "block_units",
        "client",
        "decode_s",
        "images",
        "keys",
        "passed",
        "prefill_s",
        "scale",
        "sent",
        "size",
        "units",
        "usage",
    )

    def __init__(
        self,
        keys: BlockKeys,
        units: int,
        block_units: int,
        scale: str,
        client: int,
        usage: Usage | None,
    ) -> None:
        self.keys = keys
        self.units = units
        self.block_units = block_units
        self.scale = scale
        self.client = client
        self.usage = usage
        self.size = units
        self.images = 0
        self.sent: int | None = None
        self.passed: int | None = None
        self.prefill_s: float | None = None
        self.decode_s: float | None = None

    def __repr__(self) -> str:
        return f"<AnswerClaim {self.usage!r} for {self.units} units>"
