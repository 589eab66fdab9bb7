"""The ledger: the usage of every request in a database, row by row and summed up by day."""
