"""Savings: what other routing policies would have found cached."""
