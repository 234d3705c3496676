"""Drafters over text: what they cost, and how far their drafts are right, on texts of three kinds.

    python -m benchmarks.text_drafters [--without-sglang]

Nothing is generated: groups of responses are written by a seeded random author and then replayed in rounds, as an
engine with perfect verification would emit them. That ranks drafters; a model's responses are more or less alike than
the author's, so the numbers promise nothing for a model. SGLang's drafter is compiled at its first use (about 30 s).
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.results import Result, publish
from examples.custom_drafter import LastFollower
from examples.quickstart_tasks import LAZY_HARD, add
from specactor.cpu import torchvision_ops
from specactor.data.reasoning import create_task
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.suffix import SuffixDrafter

PROMPTS, GROUP_SIZE, STEPS = 16, 8, 2
"""Each step asks for a group of responses to each prompt; the second step asks for the same prompts again."""
RUNNING, WINDOW = 64, 8
END = 0
SLIPS = 0.03  # how often the author calculates wrong, or writes a random token

Response = tuple[tuple[int, ...], list[int]]  # prompt and response
Steps = list[list[Response]]


# ------------------------------------------------------------------------------------------------ what is replayed


def phrases(rng: random.Random) -> Steps:
    """Random tokens. A prompt's responses are made of 12 parts, each one of three phrases; half of these also occur in
    responses to other prompts, and some are copied from the prompt."""

    def phrase() -> list[int]:
        return [rng.randrange(1, 4000) for _ in range(rng.randint(3, 12))]

    common = [phrase() for _ in range(200)]
    plans = []
    for _ in range(PROMPTS):
        prompt = phrase() + phrase() + phrase() + phrase()
        parts = [[rng.choice(common) if rng.random() < 0.5 else phrase() for _ in range(3)] for _ in range(12)]
        for part in rng.sample(parts, 4):
            part[0] = prompt[(start := rng.randrange(len(prompt) - 8)) : start + 8]
        plans.append((tuple(prompt), parts))

    def response(parts: list[list[list[int]]]) -> list[int]:
        tokens = [token for part in parts for token in rng.choices(part, [4, 2, 1])[0]]
        return [rng.randrange(1, 4000) if rng.random() < SLIPS else token for token in tokens] + [END]

    return [[(prompt, response(parts)) for prompt, parts in plans for _ in range(GROUP_SIZE)] for _ in range(STEPS)]


def sums(rng: random.Random) -> Steps:
    """The quickstart's worked sums, a token per character: term by term, digits reversed; some only guess."""
    problems = [[rng.randint(1, 30) for _ in range(rng.randint(3, 8))] for _ in range(PROMPTS)]

    def response(terms: list[int]) -> str:
        slipped = [term + rng.choice((-1, 1)) * (rng.random() < SLIPS) for term in terms]
        return f"#{sum(terms) + rng.randint(-1, 1)}" if rng.random() < LAZY_HARD / 4 else add(slipped)

    def ids(text: str) -> list[int]:
        return [ord(character) for character in text]

    return [
        [
            (tuple(ids("+".join(map(str, terms)) + "=")), [*ids(response(terms)), END])
            for terms in problems
            for _ in range(GROUP_SIZE)
        ]
        for _ in range(STEPS)
    ]


OPENINGS = (
    "First, let us look at the numbers.",
    "Let me think step by step.",
    "To solve this, go through the terms one at a time.",
    "Okay, so I need to work this out.",
)
WAYS = (
    "Taking {a} {sign} {term} gives {b}.",
    "{a} {sign} {term} = {b}.",
    "Next, {a} {sign} {term} is {b}.",
    "Then comes {sign} {term}, so the total is now {b}.",
    "With {sign} {term} after {a} we are at {b}.",
)
DOUBTS = ("Wait, let me check that: {a} {sign} {term} = {b}. Yes.", "Let me double check. {a} {sign} {term} is {b}.")
ENDINGS = ("Therefore, the answer is {b}.", "So the final answer is \\boxed{{{b}}}.", "The result of all terms is {b}.")


def reasoning(rng: random.Random) -> Steps:
    """chain_sum of reasoning-gym, thought aloud in a style per response, with second thoughts; BPE of 1,000 tokens."""
    entries = list(create_task("chain_sum", {"min_terms": 5, "max_terms": 10}, size=PROMPTS, seed=rng.randrange(10**6)))

    def response(expression: str) -> str:
        first, *rest = expression.split()
        total, style, text = int(first), rng.choice(WAYS), [rng.choice(OPENINGS)]
        for sign, term in zip(rest[::2], rest[1::2], strict=True):
            before = total
            total += int(sign + term) + rng.choice((-10, -1, 1, 10)) * (rng.random() < SLIPS)
            way = style if rng.random() < 0.75 else rng.choice(WAYS)
            words = {"a": before, "sign": sign, "term": term, "b": total}
            text += [way.format(**words)] + [rng.choice(DOUBTS).format(**words)] * (rng.random() < 0.1)
        return " ".join([*text, rng.choice(ENDINGS).format(b=total)])

    texts = [
        [(entry["question"], response(entry["metadata"]["expression"])) for entry in entries for _ in range(GROUP_SIZE)]
        for _ in range(STEPS)
    ]
    encode = _bpe([text for step in texts for pair in step for text in pair])
    return [[(tuple(encode(question)), [*encode(text), END]) for question, text in step] for step in texts]


def _bpe(texts: list[str]) -> Callable[[str], list[int]]:
    """A tokenizer learned from the texts; digits are tokens of their own. Token 0 is not used."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=1000, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return lambda text: list(tokenizer.encode(text).ids)


# ------------------------------------------------------------------------------------------------- who takes part


class SglangCorpus(Drafter):
    """SGLang's n-gram corpus (C++), fed and asked as its worker does, for chains in place of trees.

    One trie for all requests: n-grams of up to 18 tokens, most recent continuation, prompts as context alone.
    """

    name = "SGLang corpus"
    DEPTH = 18

    def __init__(self) -> None:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        self._corpus = NgramCorpus(
            max_trie_depth=self.DEPTH, max_bfs_breadth=1, draft_token_num=WINDOW + 1, capacity=500_000
        )
        self._changed: dict[str, DraftSequence] = {}

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        self._changed[sequence.request_id] = sequence

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        if self._changed:
            self._corpus.batch_put([self._tail(sequence) for sequence in self._changed.values()])
            self._changed.clear()
        self._corpus.synchronize()
        flat, mask = self._corpus.batch_get(
            [sequence.request_id for sequence in sequences],
            [self._tail(sequence) for sequence in sequences],
            [len(sequence.prompt_ids) + len(sequence.output_ids) for sequence in sequences],
        )
        size = WINDOW + 1
        tokens, ancestors = flat.reshape(-1, size), mask.reshape(-1, size, size)
        drafts: list[list[int]] = [[] for _ in sequences]
        rows, tips = np.arange(len(sequences)), np.zeros(len(sequences), dtype=int)
        for node in range(1, size):  # the chain that begins with the best match; other nodes are branches or padding
            path = ancestors[rows, tips].copy()
            path[:, node] = 1
            longer = (path == ancestors[:, node]).all(1)
            tips[longer] = node
            for row in rows[longer]:
                drafts[row].append(int(tokens[row, node]))
        return [draft[:window] for draft, window in zip(drafts, windows, strict=True)]

    def close(self, sequence: DraftSequence) -> None:
        self._corpus.erase_match_state([sequence.request_id])

    def _tail(self, sequence: DraftSequence) -> list[int]:
        missing = max(0, self.DEPTH - len(sequence.output_ids))
        return [*sequence.prompt_ids[len(sequence.prompt_ids) - missing :], *sequence.output_ids[-self.DEPTH :]]


# ------------------------------------------------------------------------------------------------------- the replay


@dataclass
class Replay:
    """What one drafter did with one workload. Seconds are of the processor, all threads."""

    verifies: list[int] = field(default_factory=lambda: [0] * STEPS)
    emitted: list[int] = field(default_factory=lambda: [0] * STEPS)
    drafted: int = 0
    accepted: int = 0
    propose_s: float = 0.0
    commit_s: float = 0.0
    round_s: list[float] = field(default_factory=list)  # of rounds with RUNNING requests: propose and commits

    def row(self, workload: str, name: str, num_bytes: str) -> list[str]:
        return [
            workload,
            name,
            *(f"{emitted / verifies:.2f}" for emitted, verifies in zip(self.emitted, self.verifies, strict=True)),
            f"{self.accepted / max(1, self.drafted):.2f}",
            f"{self.propose_s / sum(self.verifies) * 1e6:.1f}",
            f"{self.commit_s / sum(self.emitted) * 1e6:.1f}",
            f"{median(self.round_s) * 1e3:.2f}",
            num_bytes,
        ]


def replay(drafter: Drafter, steps: Steps) -> Replay:
    """Every response to its end: drafts are accepted while they are equal, and one token is added to them."""
    seen = Replay()
    for number, responses in enumerate(steps):
        waiting = [
            (DraftSequence(request_id=f"{number}.{i}", prompt_ids=prompt), response)
            for i, (prompt, response) in enumerate(responses)
        ][::-1]
        running: list[tuple[DraftSequence, list[int]]] = []
        while waiting or running:
            while waiting and len(running) < RUNNING:
                running.append(waiting.pop())
                drafter.open(running[-1][0])
            _round(drafter, running, seen, number)
            for sequence, response in running:
                if len(sequence.output_ids) == len(response):
                    drafter.close(sequence)
            running = [(s, response) for s, response in running if len(s.output_ids) < len(response)]
        drafter.policy_changed()
    return seen


def _round(drafter: Drafter, running: list[tuple[DraftSequence, list[int]]], seen: Replay, step: int) -> None:
    sequences = [sequence for sequence, _ in running]
    started = time.process_time()
    drafts = drafter.propose(sequences, [WINDOW] * len(running))
    propose_s = time.process_time() - started
    emitted = []
    for (sequence, response), draft in zip(running, drafts, strict=True):
        rest = response[len(sequence.output_ids) :]
        accepted = 0
        while accepted < len(draft) and accepted < len(rest) - 1 and draft[accepted] == rest[accepted]:
            accepted += 1
        emitted.append(rest[: accepted + 1])
        seen.drafted += len(draft)
        seen.accepted += accepted
    started = time.process_time()
    for sequence, tokens in zip(sequences, emitted, strict=True):
        sequence.output_ids.extend(tokens)
        drafter.commit(sequence, tokens)
    commit_s = time.process_time() - started
    seen.verifies[step] += len(running)
    seen.emitted[step] += sum(map(len, emitted))
    seen.propose_s += propose_s
    seen.commit_s += commit_s
    if len(running) == RUNNING:
        seen.round_s.append(propose_s + commit_s)


def memory(make: Callable[[], Drafter], steps: Steps) -> str:
    """Bytes that a drafter's Python objects hold after the replay, per token of a response."""
    tracemalloc.start()
    drafter = make()
    replay(drafter, steps[:1])
    gc.collect()
    with_drafter = tracemalloc.get_traced_memory()[0]
    del drafter
    gc.collect()
    held = with_drafter - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return f"{held / sum(len(response) for _, response in steps[0]):.0f}"


COLUMNS = (
    "Text",
    "drafter",
    "accept_length, step 1",
    "step 2",
    "accept_rate",
    "propose us/request",
    "commit us/token",
    "round ms",
    "bytes/token",
)
INTRO = (
    f"{PROMPTS} prompts x {GROUP_SIZE} responses, {RUNNING} requests at once, window {WINDOW}; step 2 asks for the "
    "same prompts again. The responses are not a model's: `phrases` are random tokens in parts that recur, `sums` "
    "the quickstart's worked sums in characters, `reasoning` sums of reasoning-gym thought aloud, in BPE. Times are "
    "processor time of all threads."
)
NOTES = (
    "SGLang's corpus takes in text at the next propose, in a thread that may run beside the model; part of its time "
    "goes into taking a chain from its tree, which SGLang's own verification does not need. `last_follower` is the "
    "example of a user's own drafter; it forgets after each step."
)
SHOWN = (0, 1, 2, 3, 5)  # columns on the page; the file has the rest


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """`suffix` beside SGLang's corpus."""
    texts = dict.fromkeys(row[0] for row in rows)
    of = {(row[0], row[1]): row for row in rows}
    ours = [of[text, "suffix"] for text in texts]
    theirs = [row for text in texts if (row := of.get((text, "SGLang corpus")))]
    lengths, costs = ("/".join(row[at] for row in ours) for at in (3, 5))
    beside = "/".join(row[3] for row in theirs), "/".join(row[5] for row in theirs)
    return (
        f"On prompts it has seen, `suffix` reaches accept_length {lengths} ({', '.join(texts)}) for {costs} us per "
        f"request" + (f"; SGLang's corpus {beside[0]} for {beside[1]} us." if theirs else ".")
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--without-sglang", action="store_true", help="leave SGLang's drafter out")
    options = parser.parse_args(arguments)
    drafters: list[Callable[[], Drafter]] = [LastFollower, SuffixDrafter]
    if not options.without_sglang:
        torchvision_ops.install()
        drafters.append(SglangCorpus)
    rows = []
    for workload in (phrases, sums, reasoning):
        steps = workload(random.Random(1))
        for make in drafters:
            gc.collect()
            num_bytes = "-" if make is SglangCorpus else memory(make, steps)
            rows.append(replay(make(), steps).row(workload.__name__, make().name, num_bytes))
    publish(
        "text_drafters",
        Result(
            title="Drafters over text",
            verdict=verdict(rows),
            intro=INTRO,
            columns=COLUMNS,
            rows=rows,
            summary=([COLUMNS[at] for at in SHOWN], [[row[at] for at in SHOWN] for row in rows]),
            notes=NOTES,
        ),
    )


if __name__ == "__main__":
    main()
