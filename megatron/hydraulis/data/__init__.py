"""From text to packed micro-batches: preprocessing, corpus, sampling, packing."""
