"""Names of logs (version prompt-log/1): a body of any of three dialects becomes a frame and entries, and these become names.

    body ── forms.py: chat.py, messages.py, responses.py ──► frame, entries ── canonical.py, chain.py ──► names

The names are frozen: `tests/gateway/features/prompt_log/vectors.json`. Pure.
"""
