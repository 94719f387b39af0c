"""Write the bundled instructions: small tasks about letters, numbers and words, in the JSON format of Alpaca.

    python examples/make_alpaca_sample.py                                   # rewrites examples/data/alpaca, byte for byte
    python examples/make_alpaca_sample.py --output my/folder --seed 7 --train 20000

Everything comes from the rules and the word lists below, which were written for this repository; nothing is taken from Alpaca.
`train.json` and `val.json` are lists of objects with `instruction`, `input` and `output`, one a line.

Why memorising does not help
    A hash assigns each pair of a task and what it is applied to, such as (reverse, "mok"), to train or to val, and no pair is in
    both, in whatever words the instruction is given. Letters are those of made-up words, so that the outcome must be worked out. Facts,
    such as the opposite of "hot", cannot be worked out; val asks for them in words in which train does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"

_KINDS = {
    "animal": "cat dog cow hen fox owl bee ant pig rat goat lion wolf bear deer duck frog seal crab swan",
    "food": "egg jam pie rice soup cake corn bean plum pear lime fig nut ham milk bread honey apple lemon toast",
    "tool": "saw axe hoe pen nail rake file drill spade brush knife spoon pliers hammer needle ladder wrench chisel",
}
KINDS = {kind: words.split() for kind, words in _KINDS.items()}
OPPOSITES = (
    "hot cold|big small|up down|old young|fast slow|day night|wet dry|open shut|rich poor|hard soft|high low|left right|long short|"
    "near far|early late|loud quiet|dark light|full empty|sweet sour|thick thin|strong weak|first last|good bad|new used"
)
PAIRS = [tuple(pair.split()) for pair in OPPOSITES.split("|")]
OPPOSITE = {**dict(PAIRS), **{second: first for first, second in PAIRS}}  # type: ignore[misc]

VAL_SHARE = 0.15
"""Share of all pairs of task and argument that val has."""
MAX_DRAWS = 50
"""Draws without a new record, per record wanted, before the rules count as used up."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked, in several wordings; {} stands for the argument, and without it the argument is the record's input."""

    name: str
    wordings: tuple[str, ...]
    draw: Callable[[random.Random], str]
    solve: Callable[[str], str]
    is_fact: bool = False


def made_up_word(rng: random.Random) -> str:
    """Three to five letters that can be pronounced."""
    letters = [rng.choice((CONSONANTS, VOWELS)[place % 2]) for place in range(rng.randint(3, 5))]
    return "".join(letters)


def _sum(rng: random.Random) -> str:
    return f"{rng.randint(0, 9)} + {rng.randint(0, 9)}"


def _numbers(rng: random.Random) -> str:
    return " ".join(map(str, rng.sample(range(10), 3)))


TASKS = (
    Task(
        name="capitals",
        wordings=("Write in capitals.", "Use capital letters."),
        draw=made_up_word,
        solve=str.upper,
    ),
    Task(
        name="copy",
        wordings=("Repeat the word.", "Say this again."),
        draw=made_up_word,
        solve=str,
    ),
    Task(
        name="reverse",
        wordings=("Spell backwards.", "Reverse the letters."),
        draw=made_up_word,
        solve=lambda word: word[::-1],
    ),
    Task(
        name="first",
        wordings=("Give the first letter.", "Which letter comes first?"),
        draw=made_up_word,
        solve=lambda word: word[0],
    ),
    Task(
        name="last",
        wordings=("Give the last letter.", "Which letter comes last?"),
        draw=made_up_word,
        solve=lambda word: word[-1],
    ),
    Task(
        name="count",
        wordings=("Count the letters.", "How many letters?"),
        draw=made_up_word,
        solve=lambda word: str(len(word)),
    ),
    Task(
        name="sum",
        wordings=("What is {}?", "Compute {}."),
        draw=_sum,
        solve=lambda text: str(sum(map(int, text.split(" + ")))),
    ),
    Task(
        name="largest",
        wordings=("Which number is the largest?", "Find the maximum."),
        draw=_numbers,
        solve=lambda text: max(text.split()),
    ),
    Task(
        name="opposite",
        wordings=("Name the opposite of {}.", "Say the contrary of {}."),
        draw=lambda rng: rng.choice(list(OPPOSITE)),
        solve=lambda word: OPPOSITE[word],
        is_fact=True,
    ),
    Task(
        name="kind",
        wordings=("Is it an animal, a food or a tool?", "Name the kind of thing."),
        draw=lambda rng: rng.choice([word for words in KINDS.values() for word in words]),
        solve=lambda word: next(kind for kind, words in KINDS.items() if word in words),
        is_fact=True,
    ),
)


def is_held_out(task: Task, wording: str, argument: str, seed: int) -> bool:
    """Whether a record belongs to val; a pure function. Of a fact only one wording does."""
    digest = hashlib.sha256(f"{seed}|{task.name}|{argument}".encode()).digest()
    if int.from_bytes(digest[:4], "big") >= VAL_SHARE * 2**32:
        return False
    return not task.is_fact or wording == task.wordings[digest[4] % len(task.wordings)]


def make_record(task: Task, wording: str, argument: str) -> dict[str, str]:
    """One object of the files."""
    inline = "{}" in wording
    return {
        "instruction": wording.format(argument) if inline else wording,
        "input": "" if inline else argument,
        "output": task.solve(argument),
    }


def generate(count: int, *, held_out: bool, seed: int, rng: random.Random) -> list[dict[str, str]]:
    """Draw `count` distinct records, as evenly over the tasks as these have them, from one side of the split."""
    records: dict[tuple[str, str], dict[str, str]] = {}
    for _ in range(count * MAX_DRAWS):
        task = rng.choice(TASKS)
        argument = task.draw(rng)
        wording = rng.choice(task.wordings)
        if is_held_out(task, wording, argument, seed) == held_out:
            record = make_record(task, wording, argument)
            records.setdefault((record["instruction"], record["input"]), record)
        if len(records) == count:
            return list(records.values())
    raise ValueError(f"the rules have too few records for {count} in one file; ask for fewer")


def make_sample(*, seed: int = 2023, train: int = 6000, val: int = 400) -> dict[str, list[dict[str, str]]]:
    """The whole sample, by split; equal arguments give equal records."""
    if min(train, val) < 1:
        raise ValueError(f"every split needs at least 1 record; got train={train}, val={val}")
    rng = random.Random(seed)
    return {
        "train": generate(train, held_out=False, seed=seed, rng=rng),
        "val": generate(val, held_out=True, seed=seed, rng=rng),
    }


def write_sample(sample: dict[str, list[dict[str, str]]], folder: Path) -> None:
    """Write `train.json` and `val.json` (UTF-8, one record a line) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, records in sample.items():
        lines = ",\n".join(json.dumps(record) for record in records)
        (folder / f"{split}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled instructions (Alpaca's JSON format).")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "data" / "alpaca", help="folder to write to"
    )
    parser.add_argument("--seed", type=int, default=2023)
    parser.add_argument("--train", type=int, default=6000, help="records in train.json")
    parser.add_argument("--val", type=int, default=400, help="records in val.json")
    arguments = parser.parse_args()
    sample = make_sample(seed=arguments.seed, train=arguments.train, val=arguments.val)
    write_sample(sample, arguments.output)
    print(f"wrote {arguments.output}: {', '.join(f'{len(records)} for {split}' for split, records in sample.items())}")


if __name__ == "__main__":
    main()
