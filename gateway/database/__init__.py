"""Databases by URL: SQLite in threads, Postgres in the event loop. What is in them is their users' (`Tables`)."""
