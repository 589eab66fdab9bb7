"""`warmroute replica`: one model server process. torch is imported only when a real model is asked for."""

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import re
import signal
import socket
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from replica.blocks import Sink
from replica.engine import Engine, SetupError
from replica.flags import parser
from replica.server import ServerConfig, create_app
from replica.sim import SimConfig, SimEngine

if TYPE_CHECKING:
    from replica.kv_events import KvEvents

NEEDED = ("torch", "transformers", "accelerate", "gguf", "tqdm")
NEEDED_FOR_EVENTS = ("msgpack", "zmq")
SHUTDOWN_S = 2.0  # how long open streams may go on after SIGTERM; a gateway drains a replica before it stops it
KV_TOKENS = {"transformers": 32_768, "sim": 100_000}
MAX_BATCH = {"transformers": 16, "sim": 256}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("replica").setLevel(logging.INFO)
    # Until the server listens, SIGTERM is like Ctrl-C: an unwinding that leaves no half-prepared model.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.prepare_only:
            print(_model_folder(args), file=sys.stderr)
            return 0
        # Bound before the model loads: a port that is taken should not cost half a minute to find out.
        with _bind(args.host, args.port) as listener, _events(args) as events:
            engine = _engine(args, [events] if events else [])
            asyncio.run(_serve(engine, _served_name(args), listener, _server_config(args, events)))
    except SetupError as error:
        print(f"warmroute replica: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


@contextlib.contextmanager
def _events(args: argparse.Namespace) -> "Iterator[KvEvents | None]":
    """The publisher, if there is to be one; closed after the engine."""
    if args.kv_events is None:
        if args.kv_events_replay is not None:
            raise SetupError("--kv-events-replay repeats what --kv-events has published: give both")
        yield None
        return
    missing = [name for name in NEEDED_FOR_EVENTS if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"{', '.join(missing)} not installed: pip install 'warmroute[events]' (or leave out --kv-events)")
    from replica.kv_events import EventsConfig, KvEvents

    config = EventsConfig(args.kv_events, args.kv_events_replay, args.kv_events_topic, args.kv_events_form)
    with contextlib.closing(KvEvents(config, args.block_size)) as events:
        yield events


def _engine(args: argparse.Namespace, sinks: Items[Sink]) -> Engine:
    kv_tokens = args.kv_tokens or KV_TOKENS[args.engine]
    max_batch = args.max_batch or MAX_BATCH[args.engine]
    if args.block_size < 4 or kv_tokens < 4 * args.block_size:
        raise SetupError(f"--block-size must be at least 4, and --kv-tokens ({kv_tokens}) at least four blocks")
    if args.engine == "sim":
        if args.cache_file or args.chat_template:
            raise SetupError(
                "the simulated engine has nothing to save and no template: leave out --cache-file, --chat-template"
            )
        config = SimConfig(kv_tokens, args.prefill_rate, args.decode_rate, max_batch, args.block_size)
        return SimEngine(config, sinks=sinks)
    if args.cache_file and not args.cache_file.absolute().parent.is_dir():
        raise SetupError(f"--cache-file: there is no folder {args.cache_file.absolute().parent}")
    return _real_engine(args, kv_tokens, max_batch, sinks)


def _real_engine(args: argparse.Namespace, kv_tokens: int, max_batch: int, sinks: Items[Sink]) -> Engine:
    folder = _model_folder(args)
    from replica.continuous import ContinuousConfig, ContinuousEngine

    config = ContinuousConfig(
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
    return ContinuousEngine(folder, config, sinks)


def _template(file: Path | None) -> str | None:
    try:
        return file.read_text("utf-8") if file else None
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--chat-template: cannot read {file}: {error}") from error


def _model_folder(args: argparse.Namespace) -> str | Path:
    """What to load; fetches and converts the bundled model if it is asked for and not there."""
    if args.engine == "sim":
        raise SetupError("the simulated engine has no model to prepare: leave out --prepare-only")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"{', '.join(missing)} not installed: pip install 'warmroute[replica]' (or use --engine sim)")
    if args.model is None:
        from replica.model import cache_folder, prepared_smollm2

        return prepared_smollm2(cache_folder())
    folder = Path(args.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"{folder} has no config.json: --model needs a Hugging Face model folder")
        return folder
    if folder.exists() or not HUB_ID.fullmatch(args.model):
        raise SetupError(f"there is no model folder {folder}: give --model an existing folder, or leave it out for SmolLM2")
    return str(args.model)


def _served_name(args: argparse.Namespace) -> str:
    if args.served_model_name:
        return str(args.served_model_name)
    if args.engine == "sim":
        return "sim"
    if args.model is None:
        return "smollm2"
    folder = Path(args.model).expanduser()
    return folder.resolve().name if folder.is_dir() else str(args.model)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so clients are refused until the engine is ready."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise SetupError(f"cannot listen on {host}:{port}: {reason}; choose another --port, or 0 for any") from error
    return bound


def _server_config(args: argparse.Namespace, events: "KvEvents | None") -> ServerConfig:
    return ServerConfig(
        max_queue=args.max_queue,
        coalesce_s=args.coalesce_ms / 1000,
        send_timeout_s=args.send_timeout,
        trust_templates=args.trust_request_chat_template,
        events=events.source() if events else {},
    )


async def _serve(engine: Engine, model: str, listener: socket.socket, config: ServerConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # Access logs off: a gateway stands in front, and a line per request costs more than the simulated engine's work.
    app = create_app(engine, model, config)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"replica {model} ({engine.info.kind}) ready on http://{host}:{port}", file=sys.stderr, flush=True)
        await stop.wait()
