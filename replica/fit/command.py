"""`warmroute replica fit URL`: the simulated engine's costs, measured on a running replica of any engine.

`measure` sends the requests, `solve` fits the costs; this module prints the result. torch is not needed, scipy is.
"""

import argparse
import asyncio
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Mapping
from statistics import fmean

from replica.engine import SetupError
from replica.fit.measure import Measurements, Measurer
from replica.fit.solve import Fit, solve

ROUNDS = 3
_TEXT = (
    "Measure a running replica that is otherwise idle, and print the flags of `warmroute replica --engine sim` that make the "
    f"simulated engine as fast. There are {ROUNDS} rounds of the same measurements, with a line on stderr for each: new "
    "prompts, each twice as long as the last until that took 1.5 s; up to 32 streams at once; one prompt that is four times "
    "as long as all others; new prompts beside streams. A round takes minutes on a CPU, and ends with the time that it took."
)


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute replica fit", description=_TEXT, allow_abbrev=False)
    parser.add_argument(
        "url", metavar="URL", help="the replica, such as http://127.0.0.1:9001; OpenAI's API, with /v1/completions"
    )
    parser.add_argument("--model", metavar="NAME", help="the model to ask for (default: the first of /v1/models)")
    parser.add_argument("--json", action="store_true", help="print JSON: flags, costs, every measurement and its fitted value")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if importlib.util.find_spec("scipy") is None:
            raise SetupError("scipy not installed: pip install '.[fit]' in the checkout")
        measured = asyncio.run(_measure(args.url.rstrip("/"), args.model))
        fit = solve(measured)
    except SetupError as error:
        print(f"warmroute replica fit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(_body(measured, fit)) if args.json else _page(measured, fit))
    return 0


async def _measure(url: str, model: str | None) -> Measurements:
    async with Measurer(url, model, _log) as measurer:
        for number in range(1, ROUNDS + 1):
            began = time.monotonic()
            await measurer.measure()
            _log(f"round {number} of {ROUNDS} took {time.monotonic() - began:.0f} s")
    return measurer.measured


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def flags_of(measured: Measurements, fit: Fit) -> dict[str, str]:
    """The simulated engine's flags and their values, without the values 0."""
    config = fit.config
    numbers = {
        "--prefill-rate": config.prefill_rate,
        "--decode-rate": config.decode_rate,
        "--decode-slowdown": config.decode_slowdown,
        "--prefill-chunk": config.prefill_chunk,
        "--step-ms": config.step_s * 1000,
        "--context-ms": config.context_s * 1e6,
        "--attention-ms": config.attention_s * 1e9,
        "--attention-dense": config.attention_dense,
        "--max-batch": measured.max_batch or 0,
        "--block-size": measured.block_size,
        "--kv-tokens": measured.kv_tokens or 0,
    }
    return {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in numbers.items() if value}


def command_of(flags: Mapping[str, str]) -> str:
    return " ".join(["warmroute replica --engine sim", *(f"{name} {value}" for name, value in flags.items())])


def errors_of(fit: Fit) -> dict[str, float]:
    """The mean relative error of the fit for each kind of measurement."""
    kinds = dict.fromkeys(sample.kind for sample in fit.samples)
    return {kind: fmean(abs(sample.error) for sample in fit.samples if sample.kind == kind) for kind in kinds}


def _body(measured: Measurements, fit: Fit) -> dict[str, object]:
    flags = flags_of(measured, fit)
    samples = [
        {"kind": sample.kind, "what": sample.what, "measured_s": sample.seconds, "fitted_s": sample.fitted}
        for sample in fit.samples
    ]
    return {"command": command_of(flags), "flags": flags, "mean_error": errors_of(fit), "samples": samples}


def _page(measured: Measurements, fit: Fit) -> str:
    lines = [f"{'':44}{'measured':>12}{'fitted':>12}{'error':>9}"]
    for sample in fit.samples:
        times = f"{sample.seconds * 1000:9.1f} ms{sample.fitted * 1000:9.1f} ms"
        lines.append(f"{sample.kind + ': ' + sample.what:<44}{times}{sample.error:>+9.1%}")
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in errors_of(fit).items())
    return "\n".join([*lines, "", f"mean error: {errors}", "", command_of(flags_of(measured, fit))])
