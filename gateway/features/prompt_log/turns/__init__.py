"""Turns of logs as bytes: what a body adds to a log, the whole body after a base, an answer as it is stored. Pure.

body, open calls of the base ── own_turn.py ──► names; its elements, as they are stored; its frame
base, frame, body ── joining.py ──► the whole body, for any replica
answer ── answers.py ──► its element, as it is stored; its entries
"""
