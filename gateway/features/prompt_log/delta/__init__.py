"""Delta uploads: a conversation goes to another gateway as the name of a kept log, and the new turns. `warmroute sync`.

body ── outline.py ──► places between its turns, each with the chain before it
outline, acknowledged heads ── planning.py ──► the edits that take out the known part, and the header
delta_form.py sends the call, the whole body if the other gateway does not know the log, and reads which turns are kept
"""
