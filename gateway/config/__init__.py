"""The configuration: its keys and bounds, where its values come from, and all problems in them at once."""
