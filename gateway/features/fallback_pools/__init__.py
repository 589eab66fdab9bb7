"""Fallback pools: requests that their own pool cannot serve go to another one."""
