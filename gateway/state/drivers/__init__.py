"""How transactions are carried out: SQLite in threads, Postgres in the event loop."""
