"""Sets up every process of the tests."""

import gc
import os
import sys
from unittest.mock import patch

# Else a collection in a forked rank visits, and so copies, all that its parent had imported.
os.register_at_fork(after_in_child=gc.freeze)

# Its hook would be called for every `id()` and every opened file, 3 % of the CPU time. It protects
# forks of processes that hold its locks; no test holds one.
with patch.object(sys, "addaudithook", lambda hook: None):
    import filelock  # noqa: F401
