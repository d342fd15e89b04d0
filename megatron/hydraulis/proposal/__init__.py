"""Which strategies a pool should hold, for a corpus, a cost profile and a cluster."""
