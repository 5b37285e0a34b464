"""A model whose layers torch.compile has fused around attention: fewer and larger kernels in each forward pass.

Between the attention of one layer and that of the next there is one compiled segment: output projection, residual,
norm, the gated products, residual, the next layer's norm and its projections of q, k and v. Its weights are arguments,
so that one compilation serves all layers. q, k and v are one product, and so are gate and up: their weights are laid
side by side, and the model's own parameters become views of that memory, which takes no more room than before. Keys
and queries are turned by the launch that writes the keys. Attention itself stays a call between two segments.

`Segments` serves models of the kinds in FAMILIES, whose forward pass it spells out; of any other, `compiled_calls`
compiles every layer as transformers has it, and the graph breaks at attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from ..integrations.transformers import as_autocast
from ..kvcache import Rotary
from ..scores import Reach
from .steps import Step

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BACKEND = "inductor"

Linear = tuple[torch.Tensor, torch.Tensor | None]  # a linear layer's weight (out, in) and bias (out,)
Norm = tuple[torch.Tensor, float]  # a norm's weight (channels,) and epsilon
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q (T, Hq, D), k and v (T, Hkv, D)
Activation = Callable[[torch.Tensor], torch.Tensor]
Functions = tuple[Callable[..., Any], ...]

# What was compiled for a model, by the number of rows, 0 for any; models that are gone take theirs along.
_functions: WeakKeyDictionary[torch.nn.Module, Functions] = WeakKeyDictionary()


class Heads(NamedTuple):
    """Query heads, KV heads and channels of each."""

    query: int
    kv: int
    dim: int


class Before(NamedTuple):
    """What a layer does before attention: q_norm and k_norm are over the channels of a head, where there are any."""

    norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None


class After(NamedTuple):
    """What a layer does after attention."""

    out: Linear
    norm: Norm
    gate_up: Linear
    down: Linear


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """As the families' own: float32 inside, rounded before the weight is multiplied."""
    weight, epsilon = norm
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def project(x: torch.Tensor, before: Before, heads: Heads) -> Projected:
    """q, k and v of residuals x (T, hidden)."""
    rows = F.linear(rms_norm(x, before.norm), *before.qkv).unflatten(-1, (-1, heads.dim))
    q, k, v = rows.split([heads.query, heads.kv, heads.kv], 1)
    if before.q_norm is not None and before.k_norm is not None:
        q, k = rms_norm(q, before.q_norm), rms_norm(k, before.k_norm)
    return q, k, v


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, with y a product; in half precision spelled so that the sum is left to the norm that follows.

    As a plain sum it would become part of the product, which on a card copies x first. The bits are the same: halves
    are added in float32 anyway.
    """
    if y.dtype.itemsize >= 4:
        return x + y
    return (x.float() + y.float()).to(torch.promote_types(x.dtype, y.dtype))


def conclude(o: torch.Tensor, x: torch.Tensor, after: After, activation: Activation) -> torch.Tensor:
    """The residuals after a layer: those before it, x (T, hidden), and what its attention gave, o (T, Hq, D)."""
    x = added(x, F.linear(o.flatten(1), *after.out))
    gate, up = F.linear(rms_norm(x, after.norm), *after.gate_up).chunk(2, -1)
    return added(x, F.linear(activation(gate) * up, *after.down))


class Segments:
    """The forward pass of a model of FAMILIES in compiled segments. See `fits` for what it takes."""

    def __init__(self, model: Any, heads: Heads, positions: int) -> None:
        inner = model.model
        self._heads, self._layers = heads, list(inner.layers)
        self._activation: Activation = self._layers[0].mlp.act_fn
        self._embedding = inner.embed_tokens.weight.detach()
        self._before = [_before(layer) for layer in self._layers]
        self._after = [_after(layer) for layer in self._layers]
        self._reaches = [_reach(type(model), layer.self_attn) for layer in self._layers]
        self._norm, self._head = _norm(inner.norm), _linear(model.lm_head)
        self._rotary = rotary_table(inner, model.dtype, model.device, positions)
        if model not in _functions:
            _functions[model] = self._compiled()
        self._functions = _functions[model]

    def forward(self, tokens: torch.Tensor, step: Step, keep: torch.Tensor | None) -> torch.Tensor:
        """Logits (T, vocab) after each of the packed `tokens` (T,), or (len(keep), vocab)."""
        first, between, last = self._functions
        x, *projected = first(_any_number(tokens), self._embedding, self._before[0])
        o = self._attend(0, projected, step)
        for layer in range(1, len(self._layers)):
            x, *projected = between(_any_number(o), _any_number(x), self._after[layer - 1], self._before[layer])
            o = self._attend(layer, projected, step)
        kept = len(tokens) if keep is None else len(keep)
        if keep is not None:  # one row twice: alone it would be compiled apart
            rows_kept = keep.expand(2) if kept == 1 else keep
            o, x = o[rows_kept], x[rows_kept]
        logits: torch.Tensor
        if kept:
            logits = last(_any_number(o), _any_number(x), self._after[-1], self._norm, self._head)
        else:
            logits = x.new_empty(0, len(self._head[0]))
        return logits[:kept]

    def _attend(self, layer: int, projected: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        q, k, v = as_autocast(projected)
        scale = self._layers[layer].self_attn.scaling
        return step.attend(layer, q, k, v, reach=self._reaches[layer], rotary=self._rotary, scale=scale)

    def _compiled(self) -> Functions:
        """The three segments, for any number of rows: their products choose kernels by it when they run."""
        heads, activation = self._heads, self._activation

        def first(tokens: torch.Tensor, embedding: torch.Tensor, before: Before) -> tuple[torch.Tensor, ...]:
            x = F.embedding(tokens, embedding)
            return x, *project(x, before, heads)

        def between(o: torch.Tensor, x: torch.Tensor, after: After, before: Before) -> tuple[torch.Tensor, ...]:
            x = conclude(o, x, after, activation)
            return x, *project(x, before, heads)

        def last(o: torch.Tensor, x: torch.Tensor, after: After, norm: Norm, head: Linear) -> torch.Tensor:
            return F.linear(rms_norm(conclude(o, x, after, activation), norm), *head)

        # Nothing but what _any_number marks may vary: else a second model's weights would make all sizes variables.
        functions = (first, between, last)
        return tuple(torch.compile(_apart(f), fullgraph=True, backend=BACKEND, dynamic=False) for f in functions)


def compiled_calls(model: Any) -> list[tuple[torch.nn.Module, Callable[..., Any]]]:
    """Any other model's layers, each with its call compiled as it is; the graph breaks at attention."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == count)
    layers = list(next(lists, []))
    if not layers:
        raise NotImplementedError(
            f"{type(model).__name__} has no list of its {count} layers, which compile=True compiles one by one; "
            "leave compile out"
        )

    def call(layer: Any, *args: Any, **options: Any) -> Any:
        return layer._call_impl(*args, **options)

    if model not in _functions:
        _functions[model] = (torch.compile(_apart(call), backend=BACKEND),)
    return [(layer, partial(_functions[model][0], layer)) for layer in layers]


def fits(model: Any, heads: Heads) -> bool:
    """Is it a model of FAMILIES as transformers makes it, whose parts nobody has exchanged or hooked into?"""
    home, name = type(model).__module__, type(model).__name__.lower()
    family = next((one for one in FAMILIES if home == f"transformers.models.{one}.modeling_{one}"), None)
    if family is None or name != f"{family}forcausallm":
        return False
    inner, layers = model.model, list(model.model.layers)
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    norms = [getattr(one, name, None) for one in attentions for name in ("q_norm", "k_norm")]
    norms += [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    own = [
        model,
        inner,
        inner.norm,
        inner.rotary_emb,
        *layers,
        *attentions,
        *mlps,
        *(x for x in norms if x is not None),
    ]
    projections = [(one.q_proj, one.k_proj, one.v_proj) for one in attentions]
    linears = [model.lm_head, *(x for one in projections for x in one), *(one.o_proj for one in attentions)]
    linears += [x for mlp in mlps for x in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    rows = (heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim)
    return (
        all(type(x).__module__ == home for x in own)
        and all(type(x) is torch.nn.Linear for x in linears)
        and type(inner.embed_tokens) is torch.nn.Embedding
        and len({type(mlp.act_fn) for mlp in mlps}) == 1
        and all(map(_untouched, (*own, *linears, inner.embed_tokens, *(mlp.act_fn for mlp in mlps))))
        and all(tuple(x.out_features for x in one) == rows for one in projections)
    )


def _untouched(module: torch.nn.Module) -> bool:
    """Does calling it run its class's forward() over parameters of its own, and nothing else?"""
    plain = all(type(x) is torch.nn.Parameter for x in module._parameters.values() if x is not None)
    return plain and not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def rotary_table(inner: Any, dtype: torch.dtype, device: torch.device, positions: int) -> Rotary:
    """What the model's own rotary embedding gives for positions 0, 1, …, in the model's dtype."""
    with torch.no_grad():
        cos, sin = inner.rotary_emb(
            torch.empty(0, dtype=dtype, device=device), torch.arange(positions, device=device)[None]
        )
    half = cos.shape[-1] // 2  # the other half is the same again
    return Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors (n, …), alike but for n, as one (sum of n, …) in whose memory they lie from now on.

    What lies there already stays where it is.
    """
    first, rows = tensors[0], [len(x) for x in tensors]
    together = (sum(rows), *first.shape[1:])
    starts = [first.data_ptr() + sum(rows[:n]) * first[0].numel() * first.element_size() for n in range(len(rows))]
    same = {x.untyped_storage().data_ptr() for x in tensors} == {first.untyped_storage().data_ptr()}
    if same and all(x.is_contiguous() for x in tensors) and [x.data_ptr() for x in tensors] == starts:
        return first.detach().as_strided(together, first.stride())
    packed = torch.cat([x.detach() for x in tensors])
    for x, part in zip(tensors, packed.split(rows), strict=True):
        x.data = part
    return packed


def _before(layer: Any) -> Before:
    attention = layer.self_attn
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Before(
        _norm(layer.input_layernorm),
        _linear(attention.q_proj, attention.k_proj, attention.v_proj),
        None if q_norm is None else _norm(q_norm),
        None if k_norm is None else _norm(k_norm),
    )


def _after(layer: Any) -> After:
    mlp = layer.mlp
    return After(
        _linear(layer.self_attn.o_proj),
        _norm(layer.post_attention_layernorm),
        _linear(mlp.gate_proj, mlp.up_proj),
        _linear(mlp.down_proj),
    )


def _linear(*layers: torch.nn.Linear) -> Linear:
    """Linear layers of one input as one, their outputs side by side."""
    weight = side_by_side([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return weight, side_by_side(biases) if biases else None


def _norm(layer: Any) -> Norm:
    return layer.weight.detach(), layer.variance_epsilon


def _reach(kind: type, attention: Any) -> Reach:
    """A Mistral has its window in its configuration, a Qwen has it layer by layer, a Llama has none."""
    place = attention.config if kind.__name__.startswith("Mistral") else attention
    window: int | None = getattr(place, "sliding_window", None)
    return Reach(None if window is None else window - 1)


def _apart(function: Any) -> Any:
    """The function with code of its own: torch.compile counts its compilations by that, up to a limit."""
    code = function.__code__.replace(co_name=function.__name__)
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _any_number(x: torch.Tensor) -> torch.Tensor:
    """x, of which torch.compile takes any number of rows; one row alone is always a matter of its own."""
    if len(x) > 1:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
