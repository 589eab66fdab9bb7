"""Chat for engines that take texts only, and end at anything else (Distributed-Llama)."""
