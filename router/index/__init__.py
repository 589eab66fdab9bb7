"""The prefix index: a radix trie of the prefixes held by each replica."""
