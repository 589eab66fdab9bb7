"""Connections to replicas: opened, kept, used for one call after the other."""
