"""`warmroute top`: a running gateway on a terminal, live."""

from gateway.commands.top.command import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "add_arguments", "run"]
