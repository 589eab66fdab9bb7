"""What clients and engines say on the wire, read and written: bytes in, values and bytes out. Pure."""
