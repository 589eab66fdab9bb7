"""Random bodies to a replica until time is up; an exit status other than 0 is a bug.

python -m tests.replica.fuzz --engine sim --seconds 600 [--seed N] [--clients 4] [-- flags of warmroute replica]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.replica.fuzz.run import Found, fuzz, options, replica


async def run(arguments: argparse.Namespace, seed: int) -> Found:
    log = arguments.log or Path(tempfile.mkdtemp()) / "replica.log"
    sys.stdout.write(f"seed {seed}, the replica's log is {log}\n")
    sys.stdout.flush()
    with replica(log, *options(arguments.engine, arguments.flags)) as server:
        return await fuzz(server, arguments.seconds, seed, arguments.clients)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sim", "transformers"], default="sim")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    found = asyncio.run(run(arguments, seed))
    sys.stdout.write(found.report() + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
