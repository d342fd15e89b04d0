"""Lengths of the sequences of a corpus, counted without reading tokens."""
