"""Workflows: what runs compute and how long they take, beside the same calls sent one after another by a client."""
