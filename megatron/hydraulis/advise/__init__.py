"""What a job gains by a pool, without running it."""
