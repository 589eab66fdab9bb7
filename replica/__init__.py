"""An inference server with a real prefix cache (transformers' continuous batching), and its simulated twin.

`warmroute replica` runs it. The package stands alone: it shares a wire format with the gateway, and no code.

Layers; each imports only lower ones:

    cli                         the composition root; flags (argparse only)
    process, fit, progress      replicas of one process; measuring a replica (imports sim and engine only); bars in a log
    api                         HTTP: the APIs of OpenAI (with vLLM's additions) and Anthropic
    output, sim, torch_engine   tokens to text; the two engines; these three do not import each other
    engine                      the interface between api and the engines, and its values
    cache                       block keys, block ledger, KV events
"""
