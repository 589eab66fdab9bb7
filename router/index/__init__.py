"""The prefix index: a radix trie of the prefixes that each replica holds."""
