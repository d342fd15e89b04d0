"""Measures a cost profile, and fits it again while training runs."""

from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

silence_warnings_of_imports()
