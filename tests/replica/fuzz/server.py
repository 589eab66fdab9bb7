"""`warmroute replica` that prints the stack of its main thread at SIGUSR1, whatever that does. Not those of other threads: they
would run meanwhile, and change while they are read.

python -m tests.replica.fuzz.server --port 9001 ...
"""

from __future__ import annotations

import faulthandler
import signal
import sys

from replica.cli import main

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    sys.exit(main(sys.argv[1:]))
