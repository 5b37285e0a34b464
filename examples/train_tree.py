"""Reinforcement learning by groups of answers (as GRPO does it), with each prompt computed once for its whole group.

    python examples/train_tree.py

Each step draws a group of answers to a prompt, rewards them, and trains on the tree of prompt and answers in place of
a batch that repeats the prompt in every row. First both are computed side by side: their losses and gradients agree,
and the example prints the time and the memory that each of them takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from tiny_llama import VOCAB, tiny_llama, words

import tilewise
import tilewise.integrations.transformers as integration

CLIP, RATE = 0.2, 0.003


def reward(answer: list[int]) -> float:
    """What a reward model would say; here: the share of tokens in the lower half of the vocabulary."""
    return sum(token < VOCAB // 2 for token in answer) / len(answer)


def grpo_loss(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, scored: torch.Tensor) -> Any:
    """The clipped objective over tokens of answers; all (tokens,), of the sequences one after the other."""
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * scored).sum() / scored.sum()


def logprobs_of_tree(model: Any, tree: tilewise.TokenTree) -> torch.Tensor:
    """The log-probability of every token of every sequence, one sequence after the other, by one pass over the tree."""
    with integration.training_tree(tree):
        logits = model(tree.tokens[None], position_ids=tree.positions[None], use_cache=False).logits
    return tree.unpack(tree.logprobs(logits))


def logprobs_of_batch(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The same by a row per sequence: batch (sequences, tokens)."""
    logits = model(batch, use_cache=False).logits
    told = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(told, (1, 0)).flatten()


def measured(model: Any, loss_of: Callable[[], torch.Tensor]) -> tuple[float, list[torch.Tensor], float, float]:
    """The loss, the gradients of the model's parameters, seconds, and bytes that are kept for the backward pass."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    best = float("inf")
    for _ in range(3):
        kept.clear()
        begin = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = loss_of()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        if loss.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return loss.item(), list(gradients), best, sum(n for at, n in kept.items() if at not in held)


def compare(model: Any, tree: tilewise.TokenTree, batch: torch.Tensor, of_tokens: tuple[torch.Tensor, ...]) -> None:
    """A step over the tree beside a step over the batch."""
    ours = measured(model, lambda: grpo_loss(logprobs_of_tree(model, tree), *of_tokens))
    theirs = measured(model, lambda: grpo_loss(logprobs_of_batch(model, batch), *of_tokens))
    pairs = zip(ours[1], theirs[1], strict=True)
    off = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
    for name, tokens, (loss, _, seconds, kept) in (("tree", tree.num_tokens, ours), ("batch", batch.numel(), theirs)):
        print(f"{name:<6} {tokens:6} tokens  loss {loss:+.6f}  {seconds * 1e3:7.1f} ms  {kept / 2**20:7.1f} MiB kept")
    print(f"the step is {theirs[2] / ours[2]:.1f} times as fast, with {theirs[3] / ours[3]:.1f} times less memory")
    verdict = "the same" if abs(ours[0] - theirs[0]) < 1e-5 and off < 1e-3 else "NOT THE SAME"
    print(f"{verdict} loss and gradients, to {off:.0e} of each gradient's largest value\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=24, help="tokens of an answer (%(default)s)")
    parser.add_argument("--group", type=int, default=8, help="answers to the prompt (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps of training (%(default)s)")
    args = parser.parse_args()
    if min(args.prompt, args.answer) < 1 or args.group < 2 or args.steps < 1:
        parser.error("--prompt, --answer and --steps must be at least 1, and --group 2")
    integration.register()
    model = tiny_llama()
    model.set_attn_implementation("tilewise")
    prompt = words(args.prompt, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(args.steps):
        options: dict[str, Any] = {"max_new_tokens": args.answer, "num_samples": args.group, "temperature": 1.0}
        drawn = tilewise.generate(model, [prompt], seed=step, **options)[0].samples
        answers = [sample.tokens for sample in drawn]
        tree = tilewise.TokenTree.from_sequences([prompt + answer for answer in answers])
        rewards = torch.tensor([reward(answer) for answer in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        lengths = torch.tensor(tree.lengths)
        scored = tree.unpack((tree.positions >= args.prompt).float())
        with torch.no_grad():
            old = logprobs_of_tree(model, tree)
        of_tokens = old, advantages.repeat_interleave(lengths), scored
        if step == 0:
            print(tree.show(), end="\n\n")
        for again in range(2):  # twice on the same answers, within the clipped range
            if step == 0 and again:  # the policy has moved away from the one that drew the answers
                compare(model, tree, torch.tensor([prompt + answer for answer in answers]), of_tokens)
            optimizer.zero_grad()
            grpo_loss(logprobs_of_tree(model, tree), *of_tokens).backward()
            optimizer.step()
        print(f"step {step + 1}: mean reward {rewards.mean():.3f}")


if __name__ == "__main__":
    main()
