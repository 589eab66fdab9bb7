"""`warmroute replica fit`: the simulated engine's costs, measured on a running replica."""
