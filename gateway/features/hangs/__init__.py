"""Replicas that answer probes and generate nothing: they are found, avoided, and noticed when they generate again."""
