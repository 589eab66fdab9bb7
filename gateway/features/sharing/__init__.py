"""Several gateways with one mind: the replication log over a Valkey or Redis server."""
