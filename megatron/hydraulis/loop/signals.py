"""Signals that ask a run to save and end: upstream's handler, for a second signal as well.

A batch system warns by one signal (Slurm: SIGUSR1, as a rule) and ends by another (SIGTERM), and
either may come first. Upstream's loop heeds only the one that ``--exit-signal`` names.
"""

import signal

__all__ = ["heed_both"]


def heed_both(exit_signal: signal.Signals) -> None:
    """Let SIGUSR1 do what SIGTERM does, where that is the signal that upstream's handler heeds.

    To be called after upstream has installed it. A signal that a user names is the only one.
    """
    if exit_signal == signal.SIGTERM:
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))
