"""The rules of known routers, as policies, to compare with in the simulator. Not for production.

Each follows its public source or documentation, with its defaults, and uses our own router's state: the matched prefix, the
booked work less the estimated progress of the running prefill, the requests in flight. So a row compares rules, not trackers:
the peers' own state is coarser in places (see each). Ties are broken by chance, which some of them do not.

- sglang: sglang-router and SMG, policy cache_aware (thresholds 0.3 / 64 / 1.5). If the busiest worker has more than 64 requests
  over the idlest and more than 1.5 times as many: the one with the fewest. Else, if the longest match is more than 0.3 of the
  prompt: a worker that has it. Else: the one with the fewest requests. (Earlier releases took the smallest tree here.)
  github.com/sgl-project/sglang sgl-model-gateway/src/policies/cache_aware.rs at b93974f;
  github.com/lightseekorg/smg docs/concepts/routing/cache-aware.md at 18a6017; seen November 2026.
- dynamo: NVIDIA Dynamo's KV router. Lowest of: prefill blocks (active prefill and the prompt, less its overlap) + decode
  blocks (of the active requests and of this one); overlap credit 1, prefill scale 1, temperature 0. It counts a block that
  two active requests share once; we count it for each.
  github.com/ai-dynamo/dynamo lib/kv-router/src/scheduling/selector.rs at 01690d4; docs.nvidia.com/dynamo, Routing Concepts,
  v1.3 to v1.6; seen November 2026.
- llm_d: llm-d's optimized baseline, prefix-cache-affinity-filter and token-load-scorer. If any endpoint has at least 0.8 of the
  prompt's blocks, only these are considered, unless even the least loaded of them is estimated to be more than 18 s later than
  the least loaded of the others (tokens in flight / prefill throughput, which is to be calibrated: here, the learned rate).
  Of those considered, the fewest uncached tokens in flight with this prompt's own.
  github.com/llm-d/llm-d-router pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity (README and plugin.go) at
  066c20e, scorer/tokenload at 6d91367; seen November 2026.
- lmetric: LMetric. Lowest of: (queued prefill tokens and this prompt's uncached ones) x (batch size with this one).
  Zhang et al., arXiv:2603.15202 v1, 16 March 2026.
- session: a plain session hash, as many gateways offer it: the session's replica at any load (`StickySessions` without bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from router.policies.policy import KeyPolicy, Policies, ranked
from router.policies.sticky import StickySessions
from router.types import Candidate, Prompt, Random

SGLANG_MATCH, SGLANG_MORE, SGLANG_TIMES = 0.3, 64, 1.5
LLM_D_AFFINITY, LLM_D_PENALTY_S = 0.8, 18.0


class Sglang:
    """sglang-router's rule (see the module)."""

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        loads = [one.inflight for one in candidates]
        uneven = max(loads) - min(loads) > SGLANG_MORE and max(loads) > SGLANG_TIMES * min(loads)
        longest = max(one.matched_tokens for one in candidates)
        cold = longest <= SGLANG_MATCH * (candidates[0].matched_tokens + candidates[0].uncached_tokens)
        if uneven or cold:
            return ranked(candidates, lambda one: one.inflight, chance)
        return ranked(candidates, lambda one: -one.matched_tokens, chance)

    def booked(self, replica: str) -> None:
        """Nothing to remember."""


class LlmD:
    """llm-d's rule (see the module)."""

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        warm = [one for one in candidates if one.matched_blocks >= LLM_D_AFFINITY * prompt.blocks > 0]
        others = [one for one in candidates if one not in warm]
        if warm and others and min(map(_wait_s, warm)) - min(map(_wait_s, others)) > LLM_D_PENALTY_S:
            warm, others = [], list(candidates)
        return ranked(warm, _token_load, chance) + ranked(others, _token_load, chance)

    def booked(self, replica: str) -> None:
        """Nothing to remember."""


def _wait_s(candidate: Candidate) -> float:
    return candidate.booked_tokens / candidate.prefill_rate


def _token_load(candidate: Candidate) -> float:
    return candidate.booked_tokens + candidate.uncached_tokens


def dynamo(candidate: Candidate) -> float:
    """In tokens, not blocks, and without this prompt's own decode blocks, which are the same for all candidates."""
    return _token_load(candidate) + candidate.active_tokens


def lmetric(candidate: Candidate) -> float:
    return _token_load(candidate) * (candidate.inflight + 1)


PEERS: Final[Policies] = MappingProxyType(
    {
        "sglang": Sglang,
        "dynamo": lambda: KeyPolicy(dynamo),
        "llm_d": LlmD,
        "lmetric": lambda: KeyPolicy(lmetric),
        "session": lambda: StickySessions(bound=None),
    }
)
