"""The prefix cache of both engines: block keys, the block ledger with eviction, KV events."""
