"""Responses and conversations that the gateway keeps for its clients."""
