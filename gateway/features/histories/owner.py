"""Whose a request's objects are: what it keeps, and what it may read of what is kept."""

from __future__ import annotations

from gateway.features.histories.histories import owner_of
from gateway.request.client import Caller, ClientRequest


def owner(request: ClientRequest, caller: Caller) -> str:
    """By its tenant, else by its credentials (`owner_of`)."""
    headers = request.headers
    return owner_of(caller.tenant, headers.get("Authorization"), headers.get("X-Api-Key"))
