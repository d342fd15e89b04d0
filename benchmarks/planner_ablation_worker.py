"""One side of `planner_ablation`: plans batches with the package on PYTHONPATH.

Reads a JSON object a line, ``{"pool": file, "cost_profile": file, "lengths": [...]}``, and answers
each with the plan and the CPU time of planning. It runs in the tree of either version, so it
imports no other benchmark.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool

MS_PER_S = 1e3


def main() -> None:
    """Answer until the input ends."""
    # HiGHS prints to standard output.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        planner = _planner(request["pool"], request["cost_profile"])
        start_s = time.process_time()
        plan = planner.plan(request["lengths"])
        cpu_s = time.process_time() - start_s
        assert plan.dispatch is not None  # this planner reports on every plan
        answer = {
            "strategy": plan.strategy,
            "time_ms": MS_PER_S * plan.predicted_time_s,
            "bound_ms": MS_PER_S * plan.dispatch.bound_s,
            "status": plan.dispatch.status,
            "digest": plan.digest,
            "cpu_s": cpu_s,
        }
        print(json.dumps(answer), file=answers, flush=True)


@functools.cache
def _planner(pool: str, cost_profile: str) -> CertifiedPlanner:
    return CertifiedPlanner(Pool.read(pool), ProfileCostModel.read(cost_profile))


if __name__ == "__main__":
    main()
