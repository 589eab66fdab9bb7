"""HTTP towards clients and operators; the only importer of aiohttp."""
