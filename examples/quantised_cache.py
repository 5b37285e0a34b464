"""The same prompts with the cache in different formats: memory of keys and values, and whether the answers change.

    python examples/quantised_cache.py

The model is a small Llama that first learns "The House That Jack Built" by heart, which takes seconds on a CPU. Each
prompt is the rhyme up to some verse, and the answer is right if it is the rhyme's next words. A model that knows what
comes next gives one word nearly all of the probability, and rounded keys and values do not change which word that is.
Random weights would show nothing: their two likeliest words are about equally likely everywhere, any error decides
between them, and a changed word changes all that follow, so the answers of two formats differ after a few tokens.
"""

from __future__ import annotations

import argparse

import torch
import transformers

from tilewise.serving import Engine

FORMATS = ("fp32", "bf16", "fp8", "int8", "int4")
CHAIN = (
    "the farmer sowing his corn that kept",
    "the cock that crowed in the morn that waked",
    "the priest all shaven and shorn that married",
    "the man all tattered and torn that kissed",
    "the maiden all forlorn that milked",
    "the cow with the crumpled horn that tossed",
    "the dog that worried",
    "the cat that killed",
    "the rat that ate",
    "the malt that lay in",
    "the house that Jack built .",
)
VERSES = [f"This is {' '.join(CHAIN[n:])}".split() for n in reversed(range(len(CHAIN)))]
RHYME = [word for verse in VERSES for word in verse]
WORDS = sorted(set(RHYME))
TOKENS = [WORDS.index(word) for word in RHYME]


def learned_llama(steps: int) -> transformers.PreTrainedModel:
    """A Llama of two layers that has read the rhyme `steps` times."""
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=steps, pct_start=0.2)
    text = torch.tensor([TOKENS])
    for _ in range(steps):
        loss = model(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        schedule.step()
    print(f"a Llama has read a rhyme of {len(TOKENS)} words {steps} times: loss {loss.item():.3f}\n")
    return model.eval()


def answers(
    model: transformers.PreTrainedModel, cuts: list[int], count: int, kv_format: str
) -> tuple[list[list[int]], int, int]:
    """The `count` likeliest next tokens of every prompt, bytes of a cached token, and bytes in use at most."""
    engine = Engine(model, kv_format=kv_format, num_pages=150)
    numbers = [engine.submit(TOKENS[:cut], max_new_tokens=count) for cut in cuts]
    while engine.busy:
        engine.step()
    return [engine.result(n).tokens for n in numbers], engine.cache.bytes_per_token, engine.stats().peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="how often the model reads the rhyme (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of each answer (%(default)s)")
    args = parser.parse_args()

    model = learned_llama(max(10, args.steps))
    lengths = [len(verse) for verse in VERSES]
    cuts = [sum(lengths[:n]) + 2 for n in range(2, len(VERSES))]  # up to "This is" of a verse
    right = [TOKENS[cut : cut + args.new_tokens] for cut in cuts]
    exact, _, most = answers(model, cuts, args.new_tokens, FORMATS[0])
    print(f"{len(cuts)} prompts that begin alike, {args.new_tokens} greedy tokens each\n")
    print("format  bytes per token  peak memory   of fp32  right words  as with fp32  until the first difference")
    for kv_format in FORMATS:
        found, per_token, peak = answers(model, cuts, args.new_tokens, kv_format)
        total = sum(map(len, found))
        correct = sum(a == b for one, other in zip(found, right, strict=True) for a, b in zip(one, other, strict=False))
        pairs = [list(zip(a, b, strict=True)) for a, b in zip(found, exact, strict=True)]
        same = sum(a == b for one in pairs for a, b in one)
        until = sum(next((n for n, (a, b) in enumerate(one) if a != b), len(one)) for one in pairs) / len(cuts)
        print(
            f"{kv_format:6}  {per_token:15}  {peak / 1e6:8.2f} MB  {peak / most:8.0%}  {correct / total:11.0%}  "
            f"{same / total:12.0%}  {until:4.1f} tokens"
        )
    print(f"\nAn answer by int4: … This is {' '.join(WORDS[token] for token in found[-1])}")


if __name__ == "__main__":
    main()
