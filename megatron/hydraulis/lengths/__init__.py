"""How long the sequences of a corpus are, counted without reading a token."""
