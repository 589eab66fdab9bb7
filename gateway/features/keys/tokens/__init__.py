"""Callers with a token (JWT) of an issuer: OpenID Connect."""
