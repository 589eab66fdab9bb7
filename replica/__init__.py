"""An inference server with a real prefix cache (transformers' continuous batching), and its simulated twin.

`warmroute replica` runs it. The package stands alone: it shares a wire format with the gateway, and no code.
"""
