"""Plans on their way from rank 0 to all ranks, through the job's store.

No collective carries a plan: rank 0 puts it under a key of its own and goes on, the others read it
when they need it. So planning can run ahead, and nothing is ordered against the collectives of
training.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.plan import IterationPlan


class PlanExchange:
    """One stream of plans, published once and read on every rank.

    Args:
        store: of this start of the job (`loop.job_store`), the same on every rank.
        name: of the stream; streams of one job differ.
        rank: this rank; 0 publishes.
    """

    def __init__(self, store: dist.Store, name: str, rank: int) -> None:
        self._job_store, self._name, self._num_renewals = store, name, 0
        self._store = dist.PrefixStore(f"hydraulis_plans/{name}", store)
        self._rank = rank

    def renewed(self) -> PlanExchange:
        """A stream in this one's place, in which nothing is published yet; the same on all ranks
        that have renewed it as often."""
        number = self._num_renewals + 1
        base = (
            self._name.removesuffix(f"/{self._num_renewals}") if self._num_renewals else self._name
        )
        renewed = PlanExchange(self._job_store, f"{base}/{number}", self._rank)
        renewed._num_renewals = number
        return renewed

    def publish(
        self, iteration: int, plan: IterationPlan | PlanError, *, waited_s: float = 0.0
    ) -> None:
        """Rank 0: put a plan, or the reason why there is none, where all can read it.

        waited_s: how long training stood still until the planner had it.
        """
        message: dict[str, object] = (
            {"error": str(plan)}
            if isinstance(plan, PlanError)
            else {"digest": plan.digest, "plan": plan.to_json(), "waited_s": waited_s}
        )
        self._store.set(str(iteration), json.dumps(message))

    def forget(self, iteration: int) -> None:
        """Rank 0: delete a plan that every rank has fetched."""
        self._store.delete_key(str(iteration))

    def fetch(self, iteration: int) -> tuple[IterationPlan, float]:
        """Wait for a plan, check that it arrived as it was published, and tell its waited_s.

        Raises:
            PlanError: rank 0 found no plan, or this rank reads another one than it published.
        """
        message = json.loads(self._store.get(str(iteration)))
        if "error" in message:
            raise PlanError(message["error"])
        plan = IterationPlan.from_json(message["plan"])
        if plan.digest != message["digest"]:
            raise PlanError(
                f"iteration {iteration + 1}: the plan that reached rank {self._rank} has digest "
                f"{plan.digest[:12]} but rank 0 published {message['digest'][:12]}; all ranks must "
                "run the same version"
            )
        return plan, float(message["waited_s"])
