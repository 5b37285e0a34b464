"""The public calls: validate -> plan -> run. Read prefill.py first, then decoding.py, then step.py.

Layout is `(batch, seqlen, heads, head_dim)` with any strides whose last is 1, or `(total, heads, head_dim)` packed. The
LSE is the natural log of the softmax denominator, float32, `(batch, heads, seqlen_q)` or `(heads, total_q)`. A row
with no visible key gives output 0 and LSE −inf. `causal` and `window` align bottom-right: the last query sees the
last key. Query head h reads KV head `h // (heads_q // heads_kv)`. Softmax and accumulation are float32.
"""

from tilewise.api.choice import choose_keys, plan_choice
from tilewise.api.decoding import decode, grow_plan, plan_decode
from tilewise.api.options import Level, Result, State
from tilewise.api.prefill import attention, attention_varlen, plan_attention
from tilewise.api.schedules import schedule_of
from tilewise.api.shared_prefix import shared_prefix_attention
from tilewise.api.standing import renew_plan
from tilewise.api.step import attend, plan_step, renew_step
from tilewise.api.tree import attention_tree

__all__ = [
    "Level",
    "Result",
    "State",
    "attend",
    "attention",
    "attention_tree",
    "attention_varlen",
    "choose_keys",
    "decode",
    "grow_plan",
    "plan_attention",
    "plan_choice",
    "plan_decode",
    "plan_step",
    "renew_plan",
    "renew_step",
    "schedule_of",
    "shared_prefix_attention",
]
