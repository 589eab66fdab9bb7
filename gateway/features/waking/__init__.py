"""Sleeping engines are woken when all others of their pool are full."""
