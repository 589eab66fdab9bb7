"""HTTP server for clients and operators; the only importer of aiohttp."""
