"""Limits of a key: requests and tokens per minute, money per day and month. Pure."""
