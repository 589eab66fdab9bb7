"""Disaggregated prefill and decode: one replica computes a long prompt, another one takes it over and answers.

    choose ──► a decoder, by load and transfer ──► its form ─┬─ short, or cheaper there: it computes the prompt itself
                                                            ├─ vLLM:   prefill leg ──► `kv_transfer_params` ──► decode leg
                                                            └─ SGLang: both legs at once, with one `bootstrap_room`

A pool lists prefillers in `prefill` and decoders in `decode`, beside replicas that do both in `replicas`. The core chooses
among the replicas that answer, as ever: so queues, breakers, retries, budgets, streams and fallback pools know nothing of
legs. A decoder has a form (`forms.py`), which wraps the form of its dialect and sends the prefill leg first, or
beside. Clients' own values of these fields are cut out of all requests (`dialects/steering.py`).

The prefill leg (`prefilling.py`) has a booking of its own among the prefillers: prefix affinity chooses them. The decoder's
booking begins again with its leg: what the router learns there as the rate of prefills is the rate of transfers, so that a
missing prefix is cheap there, and load decides. After any failure on the way, the decoder computes the prompt itself (vLLM), or
another prefiller and the next replica of the pool are tried (SGLang, whose decoders cannot compute prompts).

Usage is the decoder's, but for the cached tokens, which are the prefiller's (`Exchange.prefilled`).
"""
