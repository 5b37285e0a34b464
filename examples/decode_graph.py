"""A decode loop of your own: a plan that grows, and on a GPU a CUDA graph that is replayed over growing sequences.

    python examples/decode_graph.py

`plan_decode(..., room=n)` makes a plan that holds while each sequence grows by n tokens. `grow_plan` tells it the new
lengths, which on a GPU is one small copy: the list of work stays where the captured kernels look for it. So a step on
the host is: extend the sequences, grow the plan, put the new tokens into the graph's input, replay. When the room is
used up, a new plan is made and captured. Without a GPU the same calls run one by one.

The model is attention alone, with random weights; `tilewise.Engine` does all this for models of transformers.
"""

from __future__ import annotations

import argparse
import time

import torch

import tilewise

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 8, 2, 64, 512
WIDTH = HEADS * HEAD_DIM


class Attention:
    """A model of attention layers: an embedding, projections, and a matrix that makes logits."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-2] ** -0.5).to(device, dtype)

        self.embedding = weight(VOCAB, WIDTH) * WIDTH**0.5
        self.logits = weight(WIDTH, VOCAB)
        self.inputs = weight(LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.outputs = weight(LAYERS, WIDTH, WIDTH)

    def projected(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x (tokens, width) -> q (tokens, heads, head_dim), k and v (tokens, KV heads, head_dim)."""
        normed = torch.nn.functional.rms_norm(x, (WIDTH,))
        joined = (normed @ self.inputs[layer]).unflatten(-1, (-1, HEAD_DIM))
        return joined.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def prefill(self, cache: tilewise.PagedKVCache, seq: int, slots: tilewise.kvcache.Slots, tokens: list[int]) -> int:
        """The token after a sequence of which the last `tokens` are new."""
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            q, k, v = self.projected(layer, x)
            cache.write(layer, slots, k, v)
            all_k, all_v = cache.gather(layer, seq)
            o = tilewise.attention(q[None], all_k[None].to(q.dtype), all_v[None].to(q.dtype), causal=True)
            x = x + o[0].flatten(1) @ self.outputs[layer]
        return int((x[-1] @ self.logits).argmax())

    def step(
        self, cache: tilewise.PagedKVCache, slots: tilewise.kvcache.Slots, plan: tilewise.DecodePlan, x: torch.Tensor
    ) -> torch.Tensor:
        """The next token of each sequence, whose last one is x (sequences, width): all of it can be captured."""
        for layer in range(LAYERS):
            q, k, v = self.projected(layer, x)
            cache.write(layer, slots, k, v)
            o = tilewise.decode(q[:, None].contiguous(), cache, layer, plan)
            x = x + o.flatten(1) @ self.outputs[layer]
        return (x @ self.logits).argmax(-1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8, help="decoded together (%(default)s)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens that they share (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="tokens that each one gets (%(default)s)")
    parser.add_argument("--room", type=int, default=16, help="tokens that a plan has room for (%(default)s)")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if not on_gpu:
        print("There is no GPU here: every step runs call by call, without a graph.\n")
    model = Attention(device, torch.bfloat16 if on_gpu else torch.float32)
    pages = (args.prompt + 16) // 16 + args.sequences * (args.steps // 16 + 3)
    kv_format = "bf16" if on_gpu else "fp32"
    cache = tilewise.PagedKVCache(pages, 16, KV_HEADS, HEAD_DIM, num_layers=LAYERS, kv_format=kv_format, device=device)
    prefix = tilewise.PrefixCache(cache)

    seqs, answers = [], []
    prompt = torch.randint(VOCAB, (args.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    for n in range(args.sequences):  # the prompt is computed once; what follows it is each sequence's own
        tokens = [*prompt, n]
        seq, reused, slots = prefix.insert(tokens)
        seqs.append(seq)
        answers.append([model.prefill(cache, seq, slots, tokens[reused:])])

    latest = torch.tensor([answer[-1] for answer in answers], device=device)
    x = torch.empty(args.sequences, WIDTH, device=device, dtype=model.embedding.dtype)  # what a graph reads
    following = torch.empty_like(latest)  # and what it writes
    slots, plan, graph = None, None, None
    grown = plans = captures = replays = 0
    started = time.perf_counter()
    for _ in range(args.steps):
        slots = prefix.extend(seqs, latest.tolist(), into=slots)  # into: the places stay where the graph looks
        x.copy_(model.embedding[latest])
        if plan is not None and grown < args.room:
            plan = tilewise.grow_plan(plan, prefix)
            grown += 1
            if on_gpu and graph is None:  # a step of this plan has run, so all kernels are compiled
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    following.copy_(model.step(cache, slots, plan, x))
                captures += 1
        else:
            plan, graph, grown = tilewise.plan_decode(prefix, seqs, num_heads=HEADS, room=args.room), None, 0
            plans += 1
        if graph is None:
            following.copy_(model.step(cache, slots, plan, x))
        else:
            graph.replay()
            cache.mark_written(slots)  # what the captured write() has done by this replay
            replays += 1
        latest.copy_(following)
        for answer, token in zip(answers, latest.tolist(), strict=True):
            answer.append(token)
    seconds = time.perf_counter() - started

    if plan is not None:
        print(f"the last {plan.show()}\n")
    print(f"{args.steps} steps of {args.sequences} sequences in {seconds:.2f} s:")
    print(f"  {plans} plans, {captures} captures, {replays} replays, {args.steps - replays} steps call by call")
    print("the first answer:", answers[0][:12], "…")
    check(model, prompt, answers)


def check(model: Attention, prompt: list[int], answers: list[list[int]]) -> None:
    """Compute the first sequence again, at once and without a cache: every token is the likeliest one, or nearly."""
    x = model.embedding[[*prompt, 0, *answers[0][:-1]]]
    for layer in range(LAYERS):
        q, k, v = model.projected(layer, x)
        o = tilewise.attention(q[None].contiguous(), k[None].contiguous(), v[None].contiguous(), causal=True)
        x = x + o[0].flatten(1) @ model.outputs[layer]
    logits = (x @ model.logits).float()[len(prompt) :]
    chosen = logits.gather(1, torch.tensor(answers[0], device=logits.device)[:, None])[:, 0]
    short = (logits.amax(1) - chosen).max().item()
    print(f"computed at once, no chosen token is more than {short:.2g} below the largest logit")
    assert short <= (1e-3 if x.dtype == torch.float32 else 0.5)


if __name__ == "__main__":
    main()
