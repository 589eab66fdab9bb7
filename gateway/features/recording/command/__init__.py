"""`warmroute record`: a gateway's traffic, written as a trace."""
