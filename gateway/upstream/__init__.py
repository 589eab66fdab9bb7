"""HTTP client for replicas: resolving, connecting, pooling, HTTP/1.1."""
