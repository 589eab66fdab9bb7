"""Chat for engines that accept only texts, and crash at anything else (Distributed-Llama)."""
