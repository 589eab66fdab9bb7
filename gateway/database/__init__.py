"""Databases by URL: SQLite in threads, Postgres in the event loop. Features define their own tables (`Tables`)."""
