"""Recordings of traffic, for replays."""
