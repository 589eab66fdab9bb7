"""The language of workflows. Pure: documents and programs in, values out; no event loop, no clock, no file.

    text ── reading.py (JSON, YAML), python_form.py (a program) ──► plain values
         ── compiling.py, steps.py, scopes.py ──► Workflow: inputs, steps (document.py), StepGraph (graph.py): needs, killers
         ── plan.py ──► WorkflowPlan: bounds, shared prefixes, warnings

Everything that runs a workflow uses these values: `scheduling.py` (which step may start, which output is provisional),
`templates.py` (`${...}` with values), `prompts.py` (the body of a step's request), `constraints.py` (an answer as a value).
All errors are a `DocumentError` with paths, or an `EvaluationError` of one step.
"""
