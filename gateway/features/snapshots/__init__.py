"""Warm starts: snapshots of the prefix index, in a file or from another gateway."""
