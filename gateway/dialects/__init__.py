"""The wire formats of clients and engines: bytes in, values and bytes out. Pure."""
