"""Devices that are not there: ranks on a CPU that take as long as devices of a given speed would (--emulate_*).

Models, text and messages are real. A rank does its work and sleeps out the rest of the given time, so that many ranks
can share a few cores, as long as these do all the work within that time.
"""

from __future__ import annotations

import ctypes
import sys

PR_SET_TIMERSLACK = 29  # nanoseconds


def exact_sleeps() -> None:
    """Linux lets a process oversleep by 50 us to save wake-ups: that would count as overhead, several times a cycle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
