"""The cost of sending a prompt to a replica, in seconds."""
