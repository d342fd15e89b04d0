"""Planning runs without torch: in the planner process, and in the simulator."""

import subprocess
import sys

PROGRAM = """
import sys
import megatron.hydraulis.transfer.canonical
import megatron.hydraulis.transfer.collective
import megatron.hydraulis.transfer.plan
import megatron.hydraulis.transfer.role
unwanted = ("torch", "megatron.core", "megatron.training")
print([name for name in unwanted if name in sys.modules])
"""


def test_importing_transfer_plans_imports_neither_torch_nor_megatron_core() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
