"""API keys: they identify callers, limit what callers may use, and count it."""
