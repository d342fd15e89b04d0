"""Measuring a cost profile, and fitting one anew while training runs."""

from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

silence_warnings_of_imports()
