"""Writes small task sets as jsonl lines {prompt, label, metadata}, the same bytes every time.

tools/prepare_tasks.py reverse OUT.jsonl                 the quickstart's
tools/prepare_tasks.py boxes OUT.jsonl                   for configs/tools.yaml
tools/prepare_tasks.py arithmetic OUT.jsonl --num 256    from the package reasoning-gym
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"


def reverse_rows() -> Iterator[dict[str, Any]]:
    """Every pair of eight letters; the answer is the pair backwards."""
    for pair in itertools.product(LETTERS, repeat=2):
        text = "".join(pair)
        yield {"prompt": text + "=", "label": text[::-1], "metadata": {}}


def boxes_rows(*, seed: int) -> Iterator[dict[str, Any]]:
    """Six boxes with a letter in each, and one that is asked for; 96 rows, each box 16 times."""
    letters = LETTERS[:6]
    chance = random.Random(seed)
    for _, box in itertools.product(range(16), letters):
        boxes = {name: chance.choice(letters) for name in letters}
        yield {"prompt": box + "?", "label": boxes[box], "metadata": {"boxes": boxes}}


def arithmetic_rows(num: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Sums and differences of two or three small numbers, from reasoning-gym."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=num,
        seed=seed,
        min_terms=2,
        max_terms=3,
        min_digits=1,
        max_digits=1,
        operators=["+", "-"],
        allow_parentheses=False,
        allow_negation=False,
    )
    for entry in data:
        facts = {
            "source": "reasoning-gym/basic_arithmetic",
            "index": entry["metadata"]["source_index"],
        }
        question = entry["question"].strip() + " Answer with the number alone."
        yield {"prompt": question, "label": entry["answer"], "metadata": facts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=["reverse", "boxes", "arithmetic"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=256, help="rows (arithmetic)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    makers = {
        "reverse": reverse_rows,
        "boxes": lambda: boxes_rows(seed=arguments.seed),
        "arithmetic": lambda: arithmetic_rows(arguments.num, seed=arguments.seed),
    }
    rows = list(makers[arguments.task]())
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.out}: {len(rows)} rows, the first is {lines[0].strip()}")


if __name__ == "__main__":
    main()
