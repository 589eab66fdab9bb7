"""Admission: the pools' queues, limits on memory and on connections."""
