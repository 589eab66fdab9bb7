"""Coding agents' traffic through a gateway: chat, Messages and Responses in parallel."""
