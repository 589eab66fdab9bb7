"""Who may come in, and when: the pools' queues, bounds on memory and on connections."""
