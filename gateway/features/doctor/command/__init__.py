"""`warmroute doctor`: finds where the prefixes of a stream of requests break, why, at what cost, and what to change."""

from gateway.features.doctor.command.command import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "add_arguments", "run"]
