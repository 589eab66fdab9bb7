"""Money, in whole picodollars (10^-12 USD).

One million times a price in USD has six decimals, so the price of one token is a whole number of picodollars. So a bill is
exact, and a sum of bills is the same in any order: the ledger and the clients' usage agree to the last digit. (Counters of
/metrics are floats.)
"""

from __future__ import annotations

from typing import Final

DOLLAR: Final = 10**12
PER_MILLION: Final = 10**6  # picodollars for one token, at 1 USD for a million of them
MOST: Final = 10**18  # of one item of a bill: a million dollars, more than any answer costs


def dollars(amount: int) -> float:
    """Picodollars in USD, for metrics and logs."""
    return amount / DOLLAR


def decimal(amount: int) -> str:
    """Picodollars in USD, exact, without an exponent: "0.000123". O(digits)."""
    whole, rest = divmod(abs(amount), DOLLAR)
    text = f"{whole}.{rest:012d}".rstrip("0").removesuffix(".")
    return f"-{text}" if amount < 0 else text
