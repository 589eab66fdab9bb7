"""Chat for engines that take texts only, and crash at anything else (Distributed-Llama)."""
