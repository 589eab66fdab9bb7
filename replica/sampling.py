"""How one request's next token is drawn from its scores."""

import torch

from replica.engine import Request

GREEDY_BELOW = 1e-3  # a temperature this low divides scores out of float32's range, and is greedy for any purpose


class Sampler:
    """Temperature, top-p and seed of one request, with a generator of its own: its draws do not depend on its neighbours'."""

    def __init__(self, request: Request) -> None:
        self._temperature, self._top_p = request.temperature, request.top_p
        self._generator = torch.Generator()
        if request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.seed % (1 << 63))

    @classmethod
    def of(cls, request: Request) -> "Sampler | None":
        """None for a greedy request."""
        return cls(request) if request.temperature >= GREEDY_BELOW else None

    def draw(self, scores: torch.Tensor) -> int:
        """One token id from the scores of the whole vocabulary. O(vocabulary), and a sort when top_p is below 1."""
        probabilities = torch.softmax(scores.float() / self._temperature, dim=-1)
        if self._top_p < 1:
            ordered, indices = probabilities.sort(descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            # The first token always stays: nothing comes before it.
            probabilities = torch.zeros_like(probabilities).scatter(0, indices, ordered * (before < self._top_p))
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
