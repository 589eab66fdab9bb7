"""Inputs and options of `warmroute simulate`: files, recordings, "what if", money, the converter."""
