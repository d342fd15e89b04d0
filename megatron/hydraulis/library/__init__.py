"""The engine as a library: what Python programs, the training program among them, run with."""
