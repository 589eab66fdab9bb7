"""The clients' connections: accepting, reading, answering and closing them."""
