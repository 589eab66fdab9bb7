"""Facts that engines report about themselves: one table of engines, and pure functions that parse their answers.

A probe passes in the engine's answers: its model list, its Prometheus page, for some a JSON answer. `recognise` returns the
engine, `read` its facts. Nothing here raises. Impossible values (NaN, negative, a KV cache of 10^15 tokens) count as missing,
and None always means "missing".

An engine with several ranks (data parallel) has a cache in each: within a rank the largest sample counts, and the ranks are
added; `Facts.ranks` has them one by one. The page is parsed by one regular expression made from the table, in a quarter of a
millisecond for vLLM's 60 kB: a complete parser takes thirty times as long, in the event loop, for each replica at every probe.
It is parsed in slices of whole lines (`slices`, `PageReader`), between which the event loop can run: the largest page takes
80 ms of CPU time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gateway.config.kinds import MAX_RANKS, ROLES

MAX_PAGE_BYTES = 2 << 20  # of any answer that is parsed here; vLLM's page has 60 kB for each of its ranks
SLICE_BYTES = 64 << 10  # parsed at once: up to 3 ms. A longer line is skipped; vLLM's longest has 3 kB
_MAX_SAMPLES = 2048  # of all metrics in the table together: one of each for each rank
_MAX_LABEL_BYTES = 256 << 10  # of all samples together

_MAX_KV_TOKENS = 10_000_000_000
MAX_VERSION_CHARS = 200
_MAX_SEQUENCES = 1_000_000
_MAX_ADAPTERS = 1024  # in a batch
_MAX_START = 1e11  # seconds since 1970; a larger value is in milliseconds, and ignored

_START = "process_start_time_seconds"


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: str


Page = Mapping[str, Sequence[Sample]]
"""A Prometheus page: the samples of each metric that the table below names."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One row of the table: the signs of an engine, the names of its metrics, its abilities."""

    name: str
    owner: str  # `owned_by` in its model list, or ""
    running: str  # name of its gauge of running requests, or ""
    waiting: str  # of waiting ones
    rank: str  # the label that distinguishes its ranks
    silent: str  # advice if it does not report cached tokens
    zero: str  # advice if it reports none for known prefixes
    # The size of its KV cache in tokens: from its page of metrics (a `Page` has only metrics of the table), or from the JSON
    # answer to one of `inquiries`, which are tried in turn.
    page_kv: Callable[[Page, str], int | None] = lambda _page, _rank: None
    kv_metrics: tuple[str, ...] = ()  # that page_kv reads
    names_adapters: bool = False  # a body names its adapter in `lora_path`, where the model's name does not
    adapters: str = ""  # metric with the label `max_lora`, the adapters of one batch; one series for each set of running ones
    deferred: str = ""  # gauge of waiting requests by `reason`; the deferred ones, for a KV transfer, are no work before others
    progress: tuple[str, ...] = ()  # metrics of which one changes while it computes, and none while it hangs
    answer_kv: Callable[[Any], int | None] = lambda _answer: None
    inquiries: tuple[str, ...] = ()  # paths
    bounded: bool = True  # prefixes that leave the KV cache are lost; else its size is no bound
    salts: bool = False  # it separates prefixes by `cache_salt`
    retains: bool = False  # it takes `cache_retention`
    prewarms: bool = False  # it accepts `max_tokens: 0`, and generates nothing
    lacks: frozenset[str] = frozenset()  # dialects that it is known not to speak; others are found out
    # Dialects whose answers lack fields that typed clients need: they are translated, unless the pool says otherwise.
    partial: frozenset[str] = frozenset()
    counts_cached: bool = True  # its reports of cached tokens are reliable; else they are ignored
    pages: bool = True  # it has pages about itself beside its models
    # It crashes at unexpected requests, and serves one at a time: only these endpoints are used.
    fragile: frozenset[tuple[str, str]] | None = None
    plain_chat: bool = False  # it takes only chat of texts, and streams in a form of its own (`translation/adaptation/`)
    one_conversation: bool = False  # its cache holds only the last request
    # True: prompts that arrive together compute a common prefix once. False: each computes it, unless an earlier one has its
    # first token. None: it is learned (`router/learning/inflight.py`).
    shares_inflight: bool | None = None
    slots: bool = False  # a prefix is in the slot of an ended request, which the next request takes
    bootstraps: bool = False  # its decoders wait for the prefiller that a request names; else they compute prompts, too
    choices: bool = False  # it takes `structured_outputs: {choice}`
    sleeping: str = ""  # metric with a sample `sleep_state="awake"`: 0 while it sleeps, has no weights and no cache
    sleeps: str = ""  # path of a JSON answer with `is_sleeping`, asked without that metric
    versions: tuple[str, ...] = ()  # paths of JSON answers with the `weight_version` of its model
    takes_rank: bool = False  # it computes a request at the data-parallel rank that X-data-parallel-rank names
    rank_field: bytes = b""  # the member of JSON bodies that also names the rank
    priority: int = 0  # 1: a higher `priority` of a request goes first; -1: a lower one; 0: it has none
    # Paths of JSON answers with its flags: `with_settings`. Without, only a refusal tells of priorities, and nothing of roles.
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that one engine reports about itself.

    started: start of its process, in seconds since 1970. running, waiting: sequences. caching: its prefix cache is on.
    progress: the values of its metrics of progress, summed over models and ranks; empty: it has none. caches: number of its
    data-parallel ranks on its page, which have a cache each. ranks: the facts of each of several ranks; empty if they are not
    numbered from 0. asleep: it has given its memory back, and cannot answer. restorable: it has kept its weights in the host's
    memory meanwhile. tells_sleep: it has answered at `sleeps`. version: of its weights; "": unknown. priority: as in its
    profile; 0: requests get none. adapters: number that it keeps loaded; None: unknown. role, bootstrap_port: as in `Member`,
    by its own flags.
    """

    engine: EngineProfile = field(default_factory=lambda: UNKNOWN)
    kv_tokens: int | None = None
    started: float | None = None
    running: int | None = None
    waiting: int | None = None
    caching: bool | None = None
    progress: tuple[float, ...] = ()
    caches: int = 1
    ranks: tuple[Facts, ...] = ()
    asleep: bool = False
    restorable: bool = False
    tells_sleep: bool = False
    version: str = ""
    priority: int = 0
    adapters: int | None = None
    role: str = ""
    bootstrap_port: int = 0

    @property
    def capacity_tokens(self) -> int | None:
        """Maximum number of cached tokens; None: unknown or unbounded."""
        return self.kv_tokens if self.engine.bounded else None


def recognise(owners: Iterable[object], page: Page) -> EngineProfile:
    """The engine, by the `owned_by` of its models; else (a proxy, a list that needs a key) by its metrics of running and
    waiting requests.
    """
    by_owner = {engine.owner: engine for engine in ENGINES if engine.owner}
    for owner in owners:
        if isinstance(owner, str) and owner in by_owner:
            return by_owner[owner]
    named = (engine for engine in ENGINES if any(page.get(name) for name in (engine.running, engine.waiting)))
    return next(named, UNKNOWN)


def named(name: str) -> EngineProfile | None:
    """The engine with this configured name; None: the engine is to be recognised. O(1)."""
    return _BY_NAME.get(name)


def read(engine: EngineProfile, page: Page) -> Facts:
    """The facts on the page; `kv_of` may add the KV size. O(samples x ranks)."""
    facts, numbers = _read(engine, page), _ranks(engine, page)
    if len(numbers) < 2:
        return facts
    numbered = numbers == list(range(len(numbers)))
    ranks = [_read(engine, _page_of_rank(page, engine.rank, rank)) for rank in numbers] if numbered else []
    return replace(facts, caches=len(numbers), ranks=tuple(ranks))


def _ranks(engine: EngineProfile, page: Page) -> list[int]:
    """The numbers of the data-parallel ranks on the page, in order; empty if there are too many."""
    if not engine.rank:
        return []
    labels = {sample.labels.get(engine.rank, "") for sample in page.get(engine.running, ())}
    numbers = sorted({int(label) for label in labels if label.isascii() and label.isdecimal() and len(label) < 6})
    return numbers if len(numbers) <= MAX_RANKS else []


def _page_of_rank(page: Page, label: str, rank: int) -> Page:
    """The samples of a rank, and samples without a rank."""
    own = (str(rank), "")
    return {name: [each for each in samples if each.labels.get(label, "") in own] for name, samples in page.items()}


def _read(engine: EngineProfile, page: Page) -> Facts:
    return Facts(
        engine=engine,
        kv_tokens=engine.page_kv(page, engine.rank),
        started=max((start for sample in page.get(_START, ()) if (start := _start(sample.value))), default=None),
        running=_sequences(page, engine.running, engine.rank),
        waiting=_waiting(page, engine),
        caching=_caching(page),
        progress=_progress(page, engine.progress),
        adapters=_adapters(page, engine.adapters),
        asleep=_sleep_state(page, engine.sleeping, "awake") == 0,
        restorable=(_sleep_state(page, engine.sleeping, "weights_offloaded") or 0) > 0,
    )


def version_of(answer: Any) -> str:
    """The version of an engine's weights, from the parsed JSON answer to one of its `versions`; "": there is none."""
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    return version[:MAX_VERSION_CHARS] if isinstance(version, str) else ""


def with_settings(facts: Facts, answer: Mapping[str, Any]) -> Facts:
    """The facts with those in the parsed JSON answer to one of the engine's `settings`."""
    engine, mode, port = facts.engine, answer.get("disaggregation_mode"), answer.get("disaggregation_bootstrap_port")
    priority = engine.priority if answer.get("enable_priority_scheduling") is True else 0
    return replace(
        facts,
        priority=-priority if answer.get("schedule_low_priority_values_first") is True else priority,
        role=mode if mode in ROLES else "",
        bootstrap_port=port if type(port) is int and 0 < port < 1 << 16 else 0,
    )


def kv_of(engine: EngineProfile, answer: Any) -> int | None:
    """The size of the KV cache in tokens, from the parsed JSON answer to one of the engine's inquiries."""
    return engine.answer_kv(answer)


class PageReader:
    """Parses a page in Prometheus' text format slice by slice. page: the samples of the table's metrics so far, up to bounds
    that no engine reaches.
    """

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self._samples_left = _MAX_SAMPLES
        self._label_bytes_left = _MAX_LABEL_BYTES

    @property
    def page(self) -> Page:
        return self._samples

    def feed(self, lines: bytes) -> None:
        """Parse the next slice, which has whole lines. O(bytes)."""
        for match in _SAMPLE.finditer(lines):
            name = _CANONICAL[match["name"].replace(b":", b"_")]
            if not self._samples_left:
                break
            if name in _ONCE and name in self._samples:
                continue
            self._samples_left -= 1
            labels = (match["labels"] or b"")[: self._label_bytes_left].decode("utf-8", "replace")
            self._label_bytes_left -= len(labels)
            sample = Sample(dict(_LABEL.findall(labels)), match["value"].decode("utf-8", "replace"))
            self._samples.setdefault(name, []).append(sample)


def slices(text: bytes) -> Iterator[bytes]:
    """A page's whole lines, at most SLICE_BYTES at a time. Longer lines are skipped."""
    at, end = 0, min(len(text), MAX_PAGE_BYTES)
    while end - at > SLICE_BYTES:
        cut = text.rfind(b"\n", at, at + SLICE_BYTES) + 1
        if cut:
            yield text[at:cut]
        else:
            cut = text.find(b"\n", at + SLICE_BYTES, end) + 1 or end
        at = cut
    yield text[at:end]


# -- numbers, with checks


def _number(text: object) -> float | None:
    """A number that is not negative and not NaN; the caller checks its upper bound."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    try:
        value = float(text)
    except (ValueError, OverflowError):
        return None
    return value if value >= 0 else None


def _tokens(text: object) -> int | None:
    value = _number(text)
    return int(value) if value is not None and 1 <= value <= _MAX_KV_TOKENS else None


def _product(one: object, other: object) -> int | None:
    first, second = _tokens(one), _tokens(other)
    return _tokens(first * second) if first and second else None


def _start(text: str) -> float | None:
    value = _number(text)
    return value if value and value <= _MAX_START else None


def _sequences(page: Page, name: str, rank: str) -> int | None:
    value = _over_ranks(page.get(name, ()) if name else (), rank, lambda sample: _number(sample.value))
    return int(value) if value is not None and value <= _MAX_SEQUENCES else None


def _waiting(page: Page, engine: EngineProfile) -> int | None:
    """Waiting sequences that the engine could compute if it had room."""
    waiting = _sequences(page, engine.waiting, engine.rank)
    samples = [
        sample
        for sample in (page.get(engine.deferred, ()) if engine.deferred else ())
        if sample.labels.get("reason") == "deferred"
    ]
    deferred = _over_ranks(samples, engine.rank, lambda sample: _number(sample.value))
    if waiting is None or deferred is None or not deferred <= waiting:
        return waiting
    return waiting - int(deferred)


def _progress(page: Page, names: Sequence[str]) -> tuple[float, ...]:
    """The sums of these metrics over all their samples; empty without any sample."""
    if not any(name in page for name in names):
        return ()
    return tuple(sum(_number(sample.value) or 0.0 for sample in page.get(name, ())) for name in names)


def _adapters(page: Page, name: str) -> int | None:
    numbers = [_number(sample.labels.get("max_lora")) for sample in (page.get(name, ()) if name else ())]
    return next((int(number) for number in numbers if number is not None and 1 <= number <= _MAX_ADAPTERS), None)


def _sleep_state(page: Page, name: str, state: str) -> float | None:
    """The largest value of this state over the ranks; None: unknown."""
    samples = page.get(name, ()) if name else ()
    values = [_number(sample.value) for sample in samples if sample.labels.get("sleep_state") == state]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _over_ranks(samples: Sequence[Sample], rank: str, value: Callable[[Sample], float | None]) -> float | None:
    """The sum over the ranks of the largest value in each; None if there is none, or an impossible one."""
    largest: dict[str, float] = {}
    for sample in samples:
        number = value(sample)
        if number is None:
            return None
        which = sample.labels.get(rank, "")
        largest[which] = max(largest.get(which, 0), number)
    return sum(largest.values()) if largest else None


# -- single engines


def _vllm_kv(page: Page, rank: str) -> int | None:
    # Its own count of tokens is also right for models with several kinds of layers; blocks times length is not.
    def size(sample: Sample) -> int | None:
        labels = sample.labels
        return _tokens(labels.get("kv_cache_size_tokens")) or _product(labels.get("num_gpu_blocks"), labels.get("block_size"))

    return _tokens(_over_ranks(page.get("vllm:cache_config_info", ()), rank, size))


def _caching(page: Page) -> bool | None:
    """True if vLLM's prefix cache is on; None: unknown."""
    values = {sample.labels.get("enable_prefix_caching", "") for sample in page.get("vllm:cache_config_info", ())}
    return {"True": True, "False": False}.get(values.pop()) if len(values) == 1 else None


def _sglang_kv(page: Page, rank: str) -> int | None:
    tokens = _over_ranks(page.get("sglang:max_total_num_tokens", ()), rank, lambda sample: _tokens(sample.value))
    if tokens is None:
        pages = page.get("sglang:cache_config_info", ())
        tokens = _over_ranks(
            pages, rank, lambda sample: _product(sample.labels.get("num_pages"), sample.labels.get("page_size"))
        )
    return _tokens(tokens)


def _sglang_answer_kv(answer: Any) -> int | None:
    """The KV size from /v1/loads (of all ranks), or from the older /server_info."""
    if not isinstance(answer, dict):
        return None
    loads = answer.get("loads")
    if not isinstance(loads, list):
        return _tokens(answer.get("max_total_num_tokens"))
    sizes = [_tokens(load.get("max_total_num_tokens")) if isinstance(load, dict) else None for load in loads]
    return _tokens(sum(size or 0 for size in sizes)) if all(sizes) else None


def _llamacpp_answer_kv(answer: Any) -> int | None:
    """The KV size from /props: the context of one slot, times the number of slots."""
    settings = answer.get("default_generation_settings") if isinstance(answer, dict) else None
    return _product(settings.get("n_ctx"), answer.get("total_slots")) if isinstance(settings, dict) else None


VLLM = EngineProfile(
    name="vllm",
    owner="vllm",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    adapters="vllm:lora_requests_info",
    deferred="vllm:num_requests_waiting_by_reason",
    rank="engine",
    silent="Start vLLM with --enable-prompt-tokens-details.",
    zero="Is it started with --no-enable-prefix-caching? Start it with --enable-prefix-caching.",
    page_kv=_vllm_kv,
    kv_metrics=("vllm:cache_config_info",),
    progress=("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc"),
    salts=True,
    shares_inflight=True,
    choices=True,
    sleeping="vllm:engine_sleep_state",
    sleeps="/is_sleeping",
    versions=("/weight_info",),
    takes_rank=True,
    priority=-1,
)

# It has vLLM's metric names; without owned_by its page would be taken for vLLM's, which comes first.
OURS = replace(
    VLLM,
    name="warmroute",
    owner="warmroute",
    sleeps="",
    priority=0,
    prewarms=True,
    retains=True,
    shares_inflight=None,  # all but the last chunk; with slots nothing
    silent="`warmroute replica` always reports them; does a proxy in between change its answers?",
    zero="Its cache may be too small for the requests: look at vllm:prefix_cache_hits_total.",
)

SGLANG = EngineProfile(
    name="sglang",
    owner="sglang",
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    rank="dp_rank",
    silent="Start SGLang with --enable-cache-report.",
    zero="Is it started with --disable-radix-cache?",
    page_kv=_sglang_kv,
    kv_metrics=("sglang:max_total_num_tokens", "sglang:cache_config_info"),
    progress=("sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:token_usage"),
    answer_kv=_sglang_answer_kv,
    inquiries=("/v1/loads", "/server_info", "/get_server_info"),
    shares_inflight=True,
    versions=("/model_info", "/get_model_info"),
    takes_rank=True,
    rank_field=b"routed_dp_rank",  # versions before March 2026 do not know the header
    bootstraps=True,
    names_adapters=True,
    priority=1,
    settings=("/server_info", "/get_server_info"),
)

# Prefixes evicted from a slot go to a cache in the host's memory (--cache-ram, 8 GiB by default), whose size it does not
# report.
LLAMACPP = EngineProfile(
    name="llamacpp",
    owner="llamacpp",
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
    progress=("llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", "llamacpp:spec_decode_num_drafts_total"),
    rank="",
    silent="llama.cpp's server always reports them; does a proxy in between change its answers?",
    zero="Do the requests say cache_prompt: false? Are there fewer slots (--parallel) than conversations, and no --cache-ram?",
    answer_kv=_llamacpp_answer_kv,
    inquiries=("/props",),
    bounded=False,
    shares_inflight=False,
    slots=True,
    partial=frozenset(["responses"]),  # events without output_index, objects without created_at and model
)

TGI = EngineProfile(
    name="tgi",
    owner="",
    running="tgi_batch_current_size",
    waiting="tgi_queue_size",
    rank="",
    silent="TGI does not report them at all.",
    zero="TGI does not report them at all.",
    shares_inflight=False,
    lacks=frozenset(["messages", "responses"]),
)

# Its list has the namespace of each model as owned_by: "library", except for models pushed by a user.
OLLAMA = EngineProfile(
    name="ollama",
    owner="library",
    running="",
    waiting="",
    rank="",
    silent="Ollama does not report them.",
    zero="Ollama always reports 0.",
    counts_cached=False,
    pages=False,
    shares_inflight=False,
    slots=True,
)

# It crashes if a connection closes before a whole request, at JSON of unexpected types, and at bodies that are no JSON; to
# unknown paths it answers half a head, and never the rest. So it is never guessed.
DISTRIBUTED_LLAMA = EngineProfile(
    name="distributed-llama",
    owner="",
    running="",
    waiting="",
    rank="",
    silent="Distributed-Llama does not report them.",
    zero="Distributed-Llama does not report them.",
    bounded=False,
    lacks=frozenset(["messages", "responses"]),
    pages=False,
    fragile=frozenset([("GET", "/v1/models"), ("POST", "/v1/chat/completions")]),
    plain_chat=True,
    one_conversation=True,
)

UNKNOWN: EngineProfile = EngineProfile(
    name="unknown",
    salts=True,  # rather in vain than not at all, where tenants are isolated
    owner="",
    running="",
    waiting="",
    rank="",
    silent="Look for the engine's flag that puts prompt_tokens_details.cached_tokens into usage.",
    zero="Is its prefix cache on? (Ollama always reports 0: name it, with engine: ollama.)",
)

ENGINES = (VLLM, OURS, SGLANG, LLAMACPP, TGI, OLLAMA, DISTRIBUTED_LLAMA)
_BY_NAME: Mapping[str, EngineProfile] = {engine.name: engine for engine in ENGINES}

_NAMES = frozenset(
    name
    for each in ENGINES
    for name in (
        _START,
        each.running,
        each.waiting,
        each.adapters,
        each.deferred,
        each.sleeping,
        *each.kv_metrics,
        *each.progress,
    )
    if name
)
# The first sample of these counts: the others have the same label of interest, and there may be thousands.
_ONCE = frozenset(each.adapters for each in ENGINES)
# Some builds of SGLang write sglang_ for sglang:, as all exporters do that cannot have colons.
_CANONICAL: Mapping[bytes, str] = {name.replace(":", "_").encode(): name for name in sorted(_NAMES)}


def samples_of(names: Iterable[bytes]) -> re.Pattern[bytes]:
    """A pattern for samples of these metrics, whose names have "_" for ":"."""
    return re.compile(
        rb"^(?P<name>%s)" % b"|".join(re.escape(name).replace(b"_", b"[_:]") for name in names)
        + rb'(?:\{(?P<labels>(?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)\})?[ \t]++(?P<value>[^\s#]\S*)',
        re.MULTILINE,
    )


_SAMPLE = samples_of(_CANONICAL)
# Linear for any text: a search does not begin again within a word that no `=` follows.
_LABEL = re.compile(r'\b(\w++)="((?:[^"\\]|\\.)*+)"')
