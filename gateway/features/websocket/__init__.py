"""WebSockets of clients: the WebSocket mode of Responses, served by the gateway, and tunnels to replicas."""
