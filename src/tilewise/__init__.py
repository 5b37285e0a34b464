"""Tilewise: attention kernels for LLM inference. An attention problem is a list of tiles."""

from tilewise.plan.cost import CostModel
from tilewise.plan.schedule import BlockSchedule

from . import reference
from .api import (
    attend,
    attention,
    attention_tree,
    attention_varlen,
    choose_keys,
    decode,
    grow_plan,
    plan_attention,
    plan_choice,
    plan_decode,
    plan_step,
    renew_plan,
    renew_step,
    schedule_of,
    shared_prefix_attention,
)
from .gpu import schedules as _schedules  # noqa: F401, registers the kernels of schedules on a device
from .integrations import graph_cache as _graph_cache
from .integrations import prefix_ops as _prefix_ops  # noqa: F401, registers torch.ops.tilewise
from .integrations import torch_ops as _torch_ops  # noqa: F401, likewise
from .integrations.replace import install, replace_sdpa, uninstall
from .integrations.sdpa import explain, sdpa
from .kvcache import OutOfPages, PagedKVCache, PrefixCache, Rotary, Slots
from .learn import ladder as _ladder  # noqa: F401, registers the kernels of backend="emulator:NAME"
from .plan import DecodePlan, Plan, StepPlan
from .plan.standing import StandingPlan
from .plan.standing_step import StandingStep
from .serving import Completion, Engine, EngineFull, EngineStats, Generation, Sampling, Token, generate, stream
from .state import merge, merge_states
from .trees import TokenTree

__version__ = "0.1.0"

_graph_cache.mark()

__all__ = [
    "BlockSchedule",
    "Completion",
    "CostModel",
    "DecodePlan",
    "Engine",
    "EngineFull",
    "EngineStats",
    "Generation",
    "OutOfPages",
    "PagedKVCache",
    "Plan",
    "PrefixCache",
    "Rotary",
    "Sampling",
    "Slots",
    "StandingPlan",
    "StandingStep",
    "StepPlan",
    "Token",
    "TokenTree",
    "attend",
    "attention",
    "attention_tree",
    "attention_varlen",
    "choose_keys",
    "decode",
    "explain",
    "generate",
    "grow_plan",
    "install",
    "merge",
    "merge_states",
    "plan_attention",
    "plan_choice",
    "plan_decode",
    "plan_step",
    "reference",
    "renew_plan",
    "renew_step",
    "replace_sdpa",
    "schedule_of",
    "sdpa",
    "shared_prefix_attention",
    "stream",
    "uninstall",
]
