"""`python -m gateway`: the `warmroute` command, also without an installation."""

import sys

from gateway.commands.cli import main

sys.exit(main())
