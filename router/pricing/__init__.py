"""What it costs to send a prompt to a replica, in seconds."""
