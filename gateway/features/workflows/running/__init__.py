"""Runs of workflows: a pure scheduler, its calls of models and connectors, and the events for the client.

document, inputs ──► RunScheduler (scheduler.py): happenings in, calls to start or to cancel and events out. No I/O, no clock
     ├── StepTree (step_copies.py): steps that have been entered, with their results
     ├── OutputBoard (outputs.py): outputs: provisional, confirmed, retracted; streamed texts
     └── Receipt (receipt.py): tokens computed, and the least that any order of the calls computes
WorkflowRun (run.py): executes what the scheduler says, and writes its events
"""
