"""The same prompts with the cache in different formats: memory of keys and values, and whether the answers change.

python examples/quantised_cache.py
"""

from __future__ import annotations

from tiny_llama import tiny_llama, words

from tilewise.serving import Engine

FORMATS = ("fp32", "bf16", "fp8", "int8", "int4")
PROMPTS, NEW_TOKENS = 8, 24


def answers(kv_format: str) -> tuple[list[list[int]], int, int]:
    """The greedy tokens of every prompt, bytes of a cached token, and bytes in use at most."""
    engine = Engine(tiny_llama(), kv_format=kv_format, num_pages=150)
    system = words(200, seed=0)
    numbers = [engine.submit(system + words(10 + 5 * n, seed=1 + n), max_new_tokens=NEW_TOKENS) for n in range(PROMPTS)]
    while engine.busy:
        engine.step()
    return [engine.result(n).tokens for n in numbers], engine.cache.bytes_per_token, engine.stats().peak_bytes


def main() -> None:
    exact, _, most = answers(FORMATS[0])
    print(f"{PROMPTS} prompts behind one system prompt, {NEW_TOKENS} greedy tokens each\n")
    print("format  bytes a token  peak memory   of fp32  first token  all tokens  until the first difference")
    for kv_format in FORMATS:
        found, per_token, peak = answers(kv_format)
        pairs = [list(zip(a, b, strict=True)) for a, b in zip(found, exact, strict=True)]
        first = sum(one[0][0] == one[0][1] for one in pairs) / PROMPTS
        same = sum(a == b for one in pairs for a, b in one) / (PROMPTS * NEW_TOKENS)
        until = sum(next((n for n, (a, b) in enumerate(one) if a != b), NEW_TOKENS) for one in pairs) / PROMPTS
        print(
            f"{kv_format:6}  {per_token:13}  {peak / 1e6:8.2f} MB  {peak / most:8.0%}  {first:11.0%}  {same:10.0%}  "
            f"{until:4.1f} tokens"
        )
    print("\nA changed token changes all that follow it, so the last column tells more than the one before it.")


if __name__ == "__main__":
    main()
