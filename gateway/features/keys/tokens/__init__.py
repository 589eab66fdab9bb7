"""Authentication by tokens (JWT) of OpenID Connect issuers."""
