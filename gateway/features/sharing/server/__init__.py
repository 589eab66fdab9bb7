"""The server of a store: how it is reached, and what its failures mean."""
