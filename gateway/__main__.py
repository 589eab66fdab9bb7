"""`python -m gateway`: the `warmroute` command, also where it is not installed."""

import sys

from gateway.commands.cli import main

sys.exit(main())
