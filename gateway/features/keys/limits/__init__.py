"""How much the holder of a key may use: requests and tokens per minute, money per day and month. Pure."""
