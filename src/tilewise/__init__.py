"""Tilewise: attention kernels for LLM inference. An attention problem is a list of tiles."""

from . import reference
from .api import (
    attention,
    attention_varlen,
    decode,
    grow_plan,
    plan_attention,
    plan_decode,
    shared_prefix_attention,
)
from .kvcache import OutOfPages, PagedKVCache, PrefixCache, Rotary, Slots
from .plan import DecodePlan, Plan
from .sparse import BlockSchedule
from .state import merge, merge_states
from .tree import CostModel

__version__ = "0.1.0"

__all__ = [
    "BlockSchedule",
    "CostModel",
    "DecodePlan",
    "OutOfPages",
    "PagedKVCache",
    "Plan",
    "PrefixCache",
    "Rotary",
    "Slots",
    "attention",
    "attention_varlen",
    "decode",
    "grow_plan",
    "merge",
    "merge_states",
    "plan_attention",
    "plan_decode",
    "reference",
    "shared_prefix_attention",
]
