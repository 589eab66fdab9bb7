"""Coding agents' traffic through a gateway: chat, Messages and Responses side by side."""
