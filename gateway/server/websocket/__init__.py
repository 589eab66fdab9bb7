"""WebSockets of clients: Responses' WebSocket mode, which the gateway serves itself."""
