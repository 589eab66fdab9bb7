"""Requests for engines that take chat in a form of their own (`dialects/adaptation/`)."""
