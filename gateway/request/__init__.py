"""The life of one request, from its parsed body to its log line. Independent of sockets."""
