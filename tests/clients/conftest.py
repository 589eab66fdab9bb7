"""The request log of gateways in this process, as the gateway's own tests read it."""

from tests.gateway.conftest import request_lines

__all__ = ["request_lines"]
