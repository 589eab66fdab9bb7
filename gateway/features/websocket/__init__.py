"""WebSockets of clients: Responses' WebSocket mode, which the gateway serves itself, and those that go to a replica."""
