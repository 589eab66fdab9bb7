"""The async proxy: all network I/O towards clients and replicas."""

__version__ = "0.1.0"
