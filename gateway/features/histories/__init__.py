"""Responses and conversations that the gateway stores for its clients."""
