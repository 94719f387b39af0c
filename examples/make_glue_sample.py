"""Write the bundled sample: film-review-like sentences with a sentiment label, in the TSV layout of GLUE's SST-2.

    python examples/make_glue_sample.py                                   # rewrites examples/data/SST-2, byte for byte
    python examples/make_glue_sample.py --output my/SST-2 --seed 7 --train 8000

Everything comes from the grammar and the word lists below, which were written for this repository; nothing is taken from SST-2.
`train.tsv` and `dev.tsv` have the columns `sentence` and `label` (0 negative, 1 positive), `test.tsv` has GLUE's `index` and
`sentence`, and also the `label` that GLUE keeps private. Labels are balanced in every file.

Why memorising does not help
    No sentence of dev or test is in train. Nor are its *combinations*: the pairs (noun, its opinion word), (opinion word, opinion
    word) and (cue, opinion word), where a cue is a construction such as "not" or "although". A hash assigns each pair to train
    or to the held-out files, and no pair is in both. Who has only read "not dull" must work out "not boring" from its parts.

Why a bag of words does not help much
    About a quarter of the sentences negate their opinion word ("not dull" is praise) and nearly a quarter weigh two opposite ones
    ("lovely but hollow" is not), where only the order tells which one counts. "not only" negates nothing. On dev, the
    majority label is right for 50.0 % of the sentences, naive Bayes over single words for 66.8 %, naive Bayes over words and
    neighbouring pairs of words for 67.7 % (`naive_bayes_accuracy`; the tests compute these numbers again).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NEGATIVE, POSITIVE = 0, 1

OPINIONS: dict[int, tuple[str, ...]] = {
    POSITIVE: ("clever", "funny", "lovely", "moving", "superb", "vivid", "warm", "witty"),
    NEGATIVE: ("awful", "boring", "clumsy", "dull", "flat", "hollow", "stale", "ugly"),
}
NOUNS = (
    *("acting", "cast", "design", "dialogue", "editing", "ending", "finale", "humour"),
    *("music", "mystery", "pacing", "plot", "romance", "scenery", "script", "story"),
)
OPENERS = ("", "", "", "overall ", "to me ", "i think ", "in the end ")
CLOSERS = ("", "", "", " throughout", " , i have to say")


@dataclass(frozen=True, kw_only=True)
class Template:
    """A sentence pattern.

    `text` has the slots {n0}, {n1} for nouns and {a0}, {a1} for opinion words. `agrees` says for each opinion word whether it has
    the sentence's label (True) or the opposite polarity. `cue` names the construction for the held-out combinations; the empty
    cue stands for a plain statement. `pairs` lists which noun each opinion word describes.
    """

    text: str
    agrees: tuple[bool, ...]
    cue: str = ""
    pairs: tuple[tuple[int, int], ...] = ((0, 0),)


T, F = True, False
BOTH = ((0, 0), (1, 1))  # each noun has its own opinion word
SAME = ((0, 0), (0, 1))  # one noun, two opinion words

PLAIN = (
    Template(text="the {n0} is {a0}", agrees=(T,)),
    Template(text="i found the {n0} {a0}", agrees=(T,)),
    Template(text="the {n0} is {a0} and {a1}", agrees=(T, T), pairs=SAME),
    Template(text="the {n0} is {a0} and the {n1} is {a1}", agrees=(T, T), pairs=BOTH),
)
NEGATED = (
    Template(text="the {n0} is not {a0}", agrees=(F,), cue="not"),
    Template(text="the {n0} is never {a0}", agrees=(F,), cue="never"),
    Template(text="the {n0} is far from {a0}", agrees=(F,), cue="far from"),
    Template(text="the {n0} is neither {a0} nor {a1}", agrees=(F, F), cue="neither", pairs=SAME),
)
CONTRAST = (
    Template(text="the {n0} is {a0} but {a1}", agrees=(F, T), cue="but", pairs=SAME),
    Template(text="the {n0} is {a0} but the {n1} is {a1}", agrees=(F, T), cue="but", pairs=BOTH),
    Template(text="although the {n0} is {a0} , the {n1} is {a1}", agrees=(F, T), cue="although", pairs=BOTH),
    Template(text="the {n0} is {a0} , although the {n1} is {a1}", agrees=(T, F), cue="although", pairs=BOTH),
)
UNDECEIVED = (  # words of negation or contrast that turn nothing round
    Template(text="the {n0} is not only {a0} but also {a1}", agrees=(T, T), cue="not only", pairs=SAME),
)
KINDS = ((PLAIN, 0.48), (NEGATED, 0.26), (CONTRAST, 0.22), (UNDECEIVED, 0.04))

HELD_OUT_SHARE = 0.4
"""Share of all word combinations that are reserved for dev and test."""
MAX_DRAWS = 2_000
"""Draws of words for a template before another template is taken."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One line of the sample: its text, its label and the word combinations it is made of."""

    text: str
    label: int
    combinations: frozenset[tuple[str, str]]


def is_held_out(combination: tuple[str, str], seed: int) -> bool:
    """Whether a combination belongs to dev and test; a pure function of the two words and the seed."""
    digest = hashlib.sha256(f"{seed}|{combination[0]}|{combination[1]}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def fill(template: Template, label: int, rng: random.Random) -> Sentence:
    """Draw words for `template` so that the sentence has `label`."""
    opposite = NEGATIVE + POSITIVE - label
    nouns = rng.sample(NOUNS, 2)
    while True:
        words = [rng.choice(OPINIONS[label if agrees else opposite]) for agrees in template.agrees]
        if len(set(words)) == len(words):
            break
    body = template.text.format(n0=nouns[0], n1=nouns[1], a0=words[0], a1=words[-1])
    text = f"{rng.choice(OPENERS)}{body}{rng.choice(CLOSERS)} ."

    combinations = {(nouns[noun], words[word]) for noun, word in template.pairs}
    combinations |= {(template.cue, word) for word in words if template.cue}
    if len(words) == 2:
        combinations.add((min(words), max(words)))
    return Sentence(text=text, label=label, combinations=frozenset(combinations))


def generate(count: int, *, held_out: bool, seed: int, rng: random.Random, taken: set[str]) -> list[Sentence]:
    """Draw `count` distinct sentences, half of them positive, all of whose combinations lie on one side of the split.

    `taken` holds the texts used so far, in this file and in earlier ones; it grows by the sentences drawn here.
    """
    sentences: list[Sentence] = []
    groups, weights = zip(*KINDS, strict=True)
    exhausted = 0
    while len(sentences) < count:
        label = len(sentences) % 2
        template = rng.choice(rng.choices(groups, weights)[0])
        # Words are drawn again for the same template: rejecting the template too would favour those with few combinations.
        for _ in range(MAX_DRAWS):
            sentence = fill(template, label, rng)
            fits = all(is_held_out(combination, seed) == held_out for combination in sentence.combinations)
            if fits and sentence.text not in taken:
                taken.add(sentence.text)
                sentences.append(sentence)
                break
        else:
            exhausted += 1
        if exhausted > count:
            raise ValueError(f"the grammar has too few sentences for {count} in one file; ask for fewer")
    rng.shuffle(sentences)
    return sentences


def make_sample(*, seed: int = 2018, train: int = 4000, dev: int = 600, test: int = 600) -> dict[str, list[Sentence]]:
    """The whole sample, by split; equal arguments give equal sentences."""
    if min(train, dev, test) < 2:
        raise ValueError(
            f"every split needs at least 2 sentences, one per label; got train={train}, dev={dev}, test={test}"
        )
    rng = random.Random(seed)
    taken: set[str] = set()
    return {
        "train": generate(train, held_out=False, seed=seed, rng=rng, taken=taken),
        "dev": generate(dev, held_out=True, seed=seed, rng=rng, taken=taken),
        "test": generate(test, held_out=True, seed=seed, rng=rng, taken=taken),
    }


def write_sample(sample: dict[str, list[Sentence]], folder: Path) -> None:
    """Write `train.tsv`, `dev.tsv` and `test.tsv` (UTF-8, tab-separated, a header line, no quoting) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in sample.items():
        if split == "test":
            lines = ["index\tsentence\tlabel"] + [f"{i}\t{s.text}\t{s.label}" for i, s in enumerate(sentences)]
        else:
            lines = ["sentence\tlabel"] + [f"{s.text}\t{s.label}" for s in sentences]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _features(text: str, max_words: int) -> Iterator[str]:
    words = text.split()
    for length in range(1, max_words + 1):
        for start in range(len(words) - length + 1):
            yield " ".join(words[start : start + length])


def naive_bayes_accuracy(train: Sequence[Sentence], dev: Sequence[Sentence], *, max_words: int = 1) -> float:
    """Share of `dev` that multinomial naive Bayes (add-one smoothing) trained on `train` gets right.

    Features are single words with `max_words=1`, and also runs of up to `max_words` neighbouring words otherwise.
    """
    counts = {label: Counter[str]() for label in (NEGATIVE, POSITIVE)}
    for sentence in train:
        counts[sentence.label].update(_features(sentence.text, max_words))
    vocabulary = set(counts[NEGATIVE]) | set(counts[POSITIVE])
    totals = {label: counter.total() + len(vocabulary) for label, counter in counts.items()}

    def log_odds(text: str) -> float:
        known = (feature for feature in _features(text, max_words) if feature in vocabulary)
        return sum(
            math.log((counts[POSITIVE][feature] + 1) / totals[POSITIVE])
            - math.log((counts[NEGATIVE][feature] + 1) / totals[NEGATIVE])
            for feature in known
        )

    return sum((log_odds(sentence.text) > 0) == (sentence.label == POSITIVE) for sentence in dev) / len(dev)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled GLUE sample (SST-2 layout).")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "data" / "SST-2", help="folder to write to"
    )
    parser.add_argument("--seed", type=int, default=2018)
    parser.add_argument("--train", type=int, default=4000, help="sentences in train.tsv")
    parser.add_argument("--dev", type=int, default=600, help="sentences in dev.tsv")
    parser.add_argument("--test", type=int, default=600, help="sentences in test.tsv")
    arguments = parser.parse_args()
    sample = make_sample(seed=arguments.seed, train=arguments.train, dev=arguments.dev, test=arguments.test)
    write_sample(sample, arguments.output)
    words = naive_bayes_accuracy(sample["train"], sample["dev"])
    pairs = naive_bayes_accuracy(sample["train"], sample["dev"], max_words=2)
    print(
        f"wrote {arguments.output}; naive Bayes on dev: {words:.1%} with words, {pairs:.1%} with words and pairs of words"
    )


if __name__ == "__main__":
    main()
