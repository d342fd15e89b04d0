"""The way from text to packed micro-batches: preprocessing, corpus, sampling, packing."""
