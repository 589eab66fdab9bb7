"""Several gateways with a common prefix index: the replication log over a Valkey or Redis server."""
