"""Answers of a model that lies in a folder, as transformers saves it or a download leaves it.

    python examples/model_from_disk.py                  # writes a tiny Llama with random weights, and serves that
    python examples/model_from_disk.py --model PATH     # a folder of your own, with its tokenizer

Prompts that begin alike are computed, kept and read once for what they share. On a GPU the model runs in bfloat16.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_llama import tiny_llama, words

import tilewise

QUESTIONS = ("What is a tile?", "What is a plan?", "Why do states merge?")
SYSTEM = "You are a patient teacher who explains attention kernels to people who have never seen one. "


def serve(folder: Path, questions: list[str], max_new_tokens: int) -> None:
    """Load what is in the folder, and answer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    size = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__} of {size / 1e6:.1f} M parameters from {folder}, {dtype} on {device}")

    tokenizer, prompts = None, [[*words(200, seed=0), *words(8, seed=1 + n)] for n in range(len(questions))]
    if any(folder.glob("tokenizer*")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(SYSTEM + question)["input_ids"] for question in questions]
    else:
        print("There is no tokenizer in it: prompts are random token ids, and so are the answers.")

    started = time.perf_counter()
    answers = tilewise.generate(model, prompts, max_new_tokens=max_new_tokens, tokenizer=tokenizer)
    seconds = time.perf_counter() - started
    for question, answer in zip(questions, answers, strict=True):
        print(f"\n{question}  ({answer.reused} of {len(answer.prompt)} tokens reused)")
        print(" ", told(tokenizer, answer.samples[0].tokens))
    made = sum(len(answer.samples[0].tokens) for answer in answers)
    print(f"\n{made} tokens in {seconds:.2f} s")


def told(tokenizer: Any, tokens: list[int]) -> str:
    """An answer as text, or as numbers where there is no tokenizer."""
    return str(tokens) if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="a folder with config.json and weights; default: a tiny random Llama"
    )
    parser.add_argument("--question", action="append", help="may be given several times")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each answer at most (%(default)s)")
    args = parser.parse_args()
    questions = args.question or list(QUESTIONS)
    if args.model is not None:
        if not (args.model / "config.json").is_file():
            parser.error(f"--model must be a folder with a config.json, got {args.model}")
        serve(args.model, questions, args.new_tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(folder)
        serve(Path(folder), questions, args.new_tokens)


if __name__ == "__main__":
    main()
