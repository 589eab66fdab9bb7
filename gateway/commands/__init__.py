"""The commands of `warmroute`."""
