"""How candidates are ranked: the default policy and the baselines."""
