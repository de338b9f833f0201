"""Scheduling notes: why the first in the queue was not admitted, and which request was preempted for which.

Not part of a decision: the scheduler writes it down for `view` and for people, and never reads it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Lack(Enum):
    """Resource that the first in the queue lacked."""

    SLOTS = "slots"  # max_num_seqs requests run, and it may put out none of them
    BLOCKS = "blocks"  # KV blocks for its known tokens
    LEADER = "leader"  # it waits for another sample that computes the prompt of both
    BUDGET = "budget"  # max_num_batched_tokens went to those before it
    RUNNING_LACK_BLOCKS = "running_lack_blocks"  # a running request was preempted for its blocks: admit none
    SLACK = "slack"  # it is of the class background, and would lengthen a step too much


class Blocked(NamedTuple):
    """Why admission stopped in a step."""

    lack: Lack
    request_id: str  # the first in the queue
    num_blocks_short: int = 0  # BLOCKS: how many more free ones it would need


class PreemptionCause(Enum):
    BLOCKS = "blocks"  # a running request needed its blocks for the next token
    OUTRANKED = "outranked"  # a more urgent request took its slot or its blocks
    QUANTUM = "quantum"  # its turn was over, and others waited
    LIMITS = "limits"  # max_num_seqs was lowered


class Preemption(NamedTuple):
    request_id: str
    cause: PreemptionCause
    by: str | None = None  # the request it made room for


class LaneWait(Enum):
    """Why the next batch of a lane of tensor requests does not go."""

    INSTANCES = "instances"  # all of its model run
    DELAY = "delay"  # for others to share it
    RESOURCES = "resources"  # that instances share are taken, or kept for another model
    SHARE = "share"  # of the machine beside the language model is used up
    TURN = "turn"  # nothing is in its way
