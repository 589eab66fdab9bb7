"""Connection to the server of a store, and its failures."""
