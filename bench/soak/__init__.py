"""A soak test: well-behaved load, hostile clients and failing replicas together, and a conservation law at the end.

    python -m bench.soak --minutes 30 [--workers 2] [--out bench/reports/soak.md]

The fleet: a gateway; a pool of two simulated replicas and one that fails in turn in every way it knows; a second pool of two
healthy replicas that fail on certain requests ("poisoned prompts").

The load: well-behaved clients of both pools, each of whose answers is compared with the only right text; hostile clients of
every kind in `attacks.py`, one after the other; events: a simulated replica is killed and started again, or stopped and
continued, the failing replica changes its failure, a worker is killed (with two or more), the configuration is reloaded.

The law, in `law.py`: every request of a well-behaved client was answered in full, cut with an error event, or refused
with an error in OpenAI's shape; no hostile client was left without an answer; at the end no booking is open, and the gateway's
sockets, files and memory are what they were at the start. The exit status is 1 if it is broken.

With --calm there are no events, to see the effect of clients alone. `health.py` polls /health meanwhile, from a separate
process; a gateway of one worker has a core to itself.

Everything is bounded in number, size and time, listens on loopback only, and is stopped by its own process id.
"""
