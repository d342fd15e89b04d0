"""Proposes the strategies of a pool, for a corpus, a cost profile and a cluster."""
