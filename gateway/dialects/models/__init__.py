"""Names of models: in requests, and in the lists that clients ask for."""
