"""Whose a request's objects are: what it keeps, and what it may read of what is kept."""

from __future__ import annotations

from gateway.request.client import Caller, ClientRequest
from gateway.state.histories import owner_of


def owner(request: ClientRequest, caller: Caller) -> str:
    """By its tenant, else by its credentials (`owner_of`)."""
    headers = request.headers
    return owner_of(caller.tenant, headers.get("Authorization"), headers.get("X-Api-Key"))
