"""The optimizer: AdamW on this rank's canonical shards."""
