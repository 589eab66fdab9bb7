"""Costs of requests: prices, and the meter that counts tokens and money."""
