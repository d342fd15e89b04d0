"""What every process of the tests does first."""

import gc
import os

# Else a collection in a forked rank visits, and so copies, all that its parent had imported.
os.register_at_fork(after_in_child=gc.freeze)
