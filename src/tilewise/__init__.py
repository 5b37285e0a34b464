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
from .integrations.replace import install, replace_sdpa, uninstall
from .integrations.sdpa import explain, sdpa
from .kvcache import OutOfPages, PagedKVCache, PrefixCache, Rotary, Slots
from .plan import DecodePlan, Plan
from .serving import Completion, Engine, EngineStats, Generation, Sampling, Token, generate, stream
from .sparse import BlockSchedule
from .state import merge, merge_states
from .tree import CostModel

__version__ = "0.1.0"

__all__ = [
    "BlockSchedule",
    "Completion",
    "CostModel",
    "DecodePlan",
    "Engine",
    "EngineStats",
    "Generation",
    "OutOfPages",
    "PagedKVCache",
    "Plan",
    "PrefixCache",
    "Rotary",
    "Sampling",
    "Slots",
    "Token",
    "attention",
    "attention_varlen",
    "decode",
    "explain",
    "generate",
    "grow_plan",
    "install",
    "merge",
    "merge_states",
    "plan_attention",
    "plan_decode",
    "reference",
    "replace_sdpa",
    "sdpa",
    "shared_prefix_attention",
    "stream",
    "uninstall",
]
