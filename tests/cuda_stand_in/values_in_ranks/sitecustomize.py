"""Imported by every interpreter that has this folder in PYTHONPATH: ranks compute values.

For programs that start their own ranks. Processes that ranks start do not compute on the device.
"""

import os
import sys

if "RANK" in os.environ and "--multiprocessing-fork" not in sys.orig_argv:
    from tests.cuda_stand_in.values import compute_everywhere

    compute_everywhere()
