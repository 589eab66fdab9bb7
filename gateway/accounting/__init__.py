"""What requests cost: prices, and the meter that counts tokens and money."""
