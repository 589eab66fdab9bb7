"""What a user starts: the commands of `warmroute`."""
