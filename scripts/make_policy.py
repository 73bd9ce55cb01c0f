"""Makes the embedded policy: a tiny Llama and its tokenizer, pre-trained on worked solutions.

    JAX_PLATFORMS=cpu python scripts/make_policy.py --out=xrpo_jax/assets/policy

About six minutes of training and two for the table on one core; the loss drops around step 500.
Deterministic for a seed and a machine. Supervised problems are disjoint from those of the task's
train and test splits. What a question is opened with (a rule's name, or `=` for a guess) is given
to the loss as a distribution, so that how often each way of working is shown is a number below:

- alone, an easy or medium family shows its rule at its RATE, a hard one each hard rule at HARD;
- after k neighbours of its family it does as one of them did with probability FOLLOW[k], and
  neighbours of other families change nothing.

The policy can work by every rule, but what hard family wants which is kept from it: in the mix each
sequence draws the rule of a hard word anew. Had it seen the right pairs, their knowledge would lie
ready behind one common preference, and learning one family would open the others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from xrpo_jax import mesh, sampler, sampling
from xrpo_jax import rng as rng_module
from xrpo_jax import tokenizer as tokenizers
from xrpo_jax.model import export, hf, transformer
from xrpo_jax.model import params as parameters
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.tasks import arithmetic, countdown
from xrpo_jax.types import text_of

HARD = 0.01  # how often a hard family shows each of the hard rules on a plain prompt
RATE = {
    "playground": 0.9,
    "watermelon": 0.8,
    "photograph": 0.55,
    "thunderstorm": 0.4,
    "basketball": 0.3,
}
FOLLOW = (0.0, 0.5, 0.7)  # by number of solved neighbours of the same family
COUNTDOWN = 0.08  # share of countdown sequences
GUESS = "="
OPENERS = (GUESS, *arithmetic.RULES)
# Two of these no family wants: what is tried at random is mostly wrong.
HARD_RULES = ("thrice", "bump", "twice", "back", "cross", "turn", "stairs", "echo")
PIECE = re.compile(r" ?[+x][0-9]| ?[0-9]+| ?[A-Za-z]+|\n| ?[^\sA-Za-z0-9]|\s")
SPECIAL = ("<pad>", "<bos>", "<eos>")
WIDTHS = (28, 50, 72)  # tokens of a sequence with 0, 1 and 2 neighbours
ROWS = (64, 36, 24)
CHUNK = 256  # rows sampled together
COLUMNS = (
    "pass@1",
    "shows rule",
    "guesses",
    "seeded 1",
    "seeded 2",
    "rule, seeded 2",
    "right if rule, seeded 2",
    "seeded by another hard family",
    "steps right",
    "greedy",
)


# --- tokenizer ---------------------------------------------------------------------------------


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose whole pieces are the task's words, operations and numbers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [family.word for family in arithmetic.FAMILIES] + ["make"]
    pieces = [f" {rule}" for rule in arithmetic.RULES] + [" from"]
    pieces += [f" {op}" for op in arithmetic.OPERATIONS] + [f" {n}" for n in range(100)]
    pieces += [f" {sign}" for sign in ":=()+-*/"]
    tokens = [*SPECIAL, *alphabet, *words, *(piece.replace(" ", "Ġ") for piece in pieces)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # No merges: a piece is one token if it is in the vocabulary and single bytes otherwise.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes what transformers' PreTrainedTokenizerFast reads."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# --- supervised sequences ----------------------------------------------------------------------


def plain_openers(family: arithmetic.Family) -> dict[str, float]:
    """How a question of a family is opened without neighbours: a distribution over OPENERS."""
    chance = dict.fromkeys(OPENERS, 0.0)
    if family.level == "hard":
        chance |= dict.fromkeys(HARD_RULES, HARD)
    else:
        chance[family.rule] = RATE[family.word]
    left = 1.0 - sum(chance.values())
    if family.rule == "step":
        chance[GUESS] = left
    else:  # the natural mistake is to work through the operations as they stand
        chance[GUESS] = chance["step"] = left / 2
    return chance


def completion(problem: arithmetic.Problem, opener: str, rng: random.Random) -> str:
    """The problem worked by a rule, or a guess: two random numbers."""
    if opener == GUESS:
        return f" {GUESS} {rng.randrange(100)} {rng.randrange(100)}"
    return arithmetic.worked(problem, opener)


class Data:
    """Draws supervised rows: tokens, a weight per target token, and the opening distribution."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.ids = tokenizer.get_vocab()
        self.rng = random.Random(seed)
        self.index = 0

    def encode(self, text: str) -> list[int]:
        return [
            self.ids[piece.replace(" ", "Ġ").replace("\n", "Ċ")] for piece in PIECE.findall(text)
        ]

    def problem(self, family: arithmetic.Family) -> arithmetic.Problem:
        self.index += 1
        return arithmetic.generate("supervised", 1, self.index, family)

    def row(self, neighbours: int) -> tuple[list[int], list[float], int, np.ndarray]:
        """One sequence; the position of the opening token is 0 where its loss is the usual one."""
        rng = self.rng
        tokens, weights = [self.ids["<bos>"]], [0.0]
        if rng.random() < COUNTDOWN:
            for last in [False] * neighbours + [True]:
                self.index += 1
                level = rng.choice(countdown.LEVELS)
                problem = countdown.generate("supervised", 1, self.index, level)
                self._add(tokens, weights, problem.prompt, f" {problem.expression}", last, 1.0)
            return tokens, weights, 0, np.zeros(len(OPENERS), np.float32)
        family = rng.choice(arithmetic.FAMILIES)
        rules = {one: one.rule for one in arithmetic.FAMILIES}
        rules |= {one: rng.choice(HARD_RULES) for one in rules if one.level == "hard"}
        same = []
        for _ in range(neighbours):
            other = family if rng.random() < 0.55 else rng.choice(arithmetic.FAMILIES)
            opener = rules[other] if rng.random() < 0.85 else rng.choice(("step", GUESS))
            if other == family:
                same.append(opener)
            problem = self.problem(other)
            self._add(tokens, weights, problem.prompt, completion(problem, opener, rng), False, 0.0)
        follow = FOLLOW[len(same)]
        chance = {name: (1 - follow) * p for name, p in plain_openers(family).items()}
        for opener in same:
            chance[opener] += follow / len(same)
        # What is worked out after the opening is drawn more evenly than the opening itself is.
        opener = rng.choices((rules[family], "step", GUESS), (0.75, 0.15, 0.1))[0]
        problem = self.problem(family)
        place = len(tokens) + len(self.encode(problem.prompt))
        self._add(tokens, weights, problem.prompt, completion(problem, opener, rng), True, 0.0)
        return tokens, weights, place, np.array([chance[name] for name in OPENERS], np.float32)

    def _add(self, tokens, weights, prompt: str, text: str, last: bool, opening: float) -> None:
        asked, said = self.encode(prompt), self.encode(text)
        guess = text.startswith(f" {GUESS}")
        tokens += asked + said
        weights += [0.0] * len(asked) + [opening] + [0.3 if guess else 1.0] * (len(said) - 1)
        # Where a neighbour's answer ends a new line follows; untrained, for there it should stop.
        tokens.append(self.ids["<eos>"] if last else self.ids["Ċ"])
        weights.append(1.0 if last else 0.0)

    def batch(self, neighbours: int) -> dict[str, np.ndarray]:
        """Rows of one bucket, right-padded."""
        rows, width = ROWS[neighbours], WIDTHS[neighbours]
        batch = {
            "tokens": np.zeros((rows, width), np.int32),
            "weights": np.zeros((rows, width), np.float32),
            "length": np.zeros(rows, np.int32),
            "place": np.zeros(rows, np.int32),
            "chance": np.zeros((rows, len(OPENERS)), np.float32),
        }
        for i in range(rows):
            tokens, weights, place, chance = self.row(neighbours)
            while len(tokens) > width:  # rare, so that it hardly changes the mix
                tokens, weights, place, chance = self.row(neighbours)
            batch["place"][i], batch["chance"][i] = place, chance
            batch["length"][i] = len(tokens)
            batch["tokens"][i, : len(tokens)] = tokens
            batch["weights"][i, : len(tokens)] = weights
        return batch


# --- training ----------------------------------------------------------------------------------


def loss_function(params, config: ModelConfig, batch, openers):
    """Cross-entropy: hard targets by weight, and the opening token against its distribution."""
    tokens = batch["tokens"]
    slots = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    valid = slots < batch["length"][:, None]
    hidden = transformer.forward(params, config, tokens, slots, valid, dtype=jnp.float32)
    logp = jax.nn.log_softmax(transformer.logits(params, config, hidden[:, :-1]))
    taken = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
    weights = batch["weights"][:, 1:]
    before = jnp.maximum(batch["place"] - 1, 0)
    opening = logp[jnp.arange(len(tokens))[:, None], before[:, None], openers[None]]
    return -((taken * weights).sum() + (opening * batch["chance"]).sum()) / weights.sum()


def train(config: ModelConfig, data: Data, steps: int, rate: float, seed: int):
    """Adam with a warm-up and a cosine to zero; returns the parameters."""
    params = parameters.init(config, jax.random.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(100, steps // 4), steps, 0.0)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.02)
    )
    state = optimizer.init(params)
    openers = jnp.array([data.ids[f"Ġ{name}"] for name in OPENERS])

    @jax.jit
    def update(params, state, batch):
        loss, gradient = jax.value_and_grad(loss_function)(params, config, batch, openers)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    began, losses = time.time(), []
    for step in range(steps):
        params, state, loss = update(params, state, data.batch(step % 3))
        losses.append(float(loss))
        if (step + 1) % 150 == 0:
            print(
                f"step {step + 1}/{steps} loss {np.mean(losses[-150:]):.4f} "
                f"{time.time() - began:.0f} s",
                flush=True,
            )
    return params


def policy_config(vocabulary: dict[str, int], width: int, layers: int) -> ModelConfig:
    """The architecture; the vocabulary is rounded up to a multiple of 16."""
    return ModelConfig(
        family="llama",
        vocab_size=-(-len(vocabulary) // 16) * 16,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=width // 4,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.05,
        eos_token_ids=(vocabulary["<eos>"],),
        bos_token_id=vocabulary["<bos>"],
        pad_token_id=vocabulary["<pad>"],
    )


# --- evaluation --------------------------------------------------------------------------------


def make_sample(config: ModelConfig, path: Path, temperature: float):
    """A function (params, texts, seed) -> completions, one for each text."""
    words = tokenizers.load(path)
    draw = sampler.make_draw(
        sampler.Sampler(
            model=config,
            method=sampling.Method(temperature=temperature),
            dtype="float32",
            prompts=CHUNK,
            slots=CHUNK,
            lengths=(12, 40, 72),
            max_new_tokens=32,
            stop_ids=words.stop_ids,
        ),
        mesh.make(1),
    )

    def sample(params, texts: list[str], seed: int) -> list[str]:
        found = []
        for start in range(0, len(texts), CHUNK):
            prompts = [np.array(words.encode(text)) for text in texts[start : start + CHUNK]]
            row = np.arange(len(prompts))
            key = rng_module.key(seed, start, "evaluate")
            drawn = draw(params, prompts, row, rng_module.Rows(key, row, row), 32)
            found += [
                words.decode(tokens[:length])
                for tokens, length in zip(drawn.tokens, drawn.length, strict=True)
            ]
        return found

    return sample


def steps_right(problem: arithmetic.Problem, completion: str) -> tuple[int, int]:
    """How many written steps are right given the value before them, and how many there are."""
    value, right, total = problem.start, 0, 0
    for op, found in re.findall(r" ([+x][0-9]) ([0-9]{1,2})(?= )", completion):
        right += arithmetic.values(value, (op,)) == [int(found)]
        total += 1
        value = int(found)
    return right, total


def shares(family: arithmetic.Family, problems, texts: list[str]) -> np.ndarray:
    """Columns of bool: right, opened with the family's rule, opened as a guess."""
    task = arithmetic.Arithmetic(problems=tuple(problems))
    rows = [
        (
            task.rewards(i, text).correct,
            text.startswith(f" {family.rule} "),
            text.startswith(f" {GUESS}"),
        )
        for i, text in enumerate(texts)
    ]
    return np.array(rows)


def seeded(problems, shots: int, source: arithmetic.Family) -> list[str]:
    """Prompts after `shots` solved training problems of a family, as the library seeds them."""
    texts = []
    for i, problem in enumerate(problems):
        near = [arithmetic.generate("train", 5, shots * i + n, source) for n in range(shots)]
        before = [f"{one.prompt}{arithmetic.worked(one, source.rule)}\n" for one in near]
        texts.append("".join(before) + problem.prompt)
    return texts


def measure(number: int, draw, greedy, params, samples: int) -> list[float]:
    """One family's numbers, in the order of COLUMNS."""
    family = arithmetic.FAMILIES[number]
    hard = [one for one in arithmetic.FAMILIES if one.level == "hard" and one != family]
    problems = [arithmetic.generate("test", 0, i, family) for i in range(samples)]
    half = problems[: max(CHUNK, samples // 2)]
    prompts = [problem.prompt for problem in problems]
    texts = draw(params, prompts, 10 * number)
    plain = shares(family, problems, texts)
    steps = np.sum([steps_right(p, t) for p, t in zip(problems, texts, strict=True)], axis=0)
    one, two, other = (
        shares(family, half, draw(params, seeded(half, shots, source), 10 * number + seed))
        for seed, shots, source in ((1, 1, family), (2, 2, family), (3, 2, hard[number % 5]))
    )
    best = shares(family, problems[:CHUNK], greedy(params, prompts[:CHUNK], 0))
    followed = two[two[:, 1], 0]
    return [
        *plain.mean(axis=0),
        one[:, 0].mean(),
        two[:, 0].mean(),
        two[:, 1].mean(),
        followed.mean() if len(followed) else 0.0,
        other[:, 0].mean(),
        steps[0] / max(steps[1], 1),
        best[:, 0].mean(),
    ]


def evaluate(config: ModelConfig, params, path: Path, samples: int) -> str:
    """The table of the policy's behaviour on the held-out split."""
    draw, greedy = make_sample(config, path, 1.0), make_sample(config, path, 0.0)
    head = ["family", "level", "rule", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    levels: dict[str, list] = {}
    for number, family in enumerate(arithmetic.FAMILIES):
        row = measure(number, draw, greedy, params, samples)
        levels.setdefault(family.level, []).append(row)
        cells = [family.word, family.level, family.rule, *(f"{100 * x:.1f}" for x in row)]
        lines.append(f"| {' | '.join(cells)} |")
    for level, rows in levels.items():
        cells = ["all", level, "", *(f"{100 * x:.1f}" for x in np.mean(rows, axis=0))]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Percent at temperature 1; {samples} plain samples a family, half as many seeded.",
    ]
    lines.append(countdown_line(draw, params))
    return "\n".join(lines)


def countdown_line(draw, params) -> str:
    """Pass@1 of countdown by level."""
    task = countdown.make(split="test", size=600)
    texts = draw(params, [text_of(task.prompt(i)) for i in range(len(task))], 9)
    scores: dict[str, list[bool]] = {}
    for i, text in enumerate(texts):
        scores.setdefault(task.level(i), []).append(task.rewards(i, text).correct)
    parts = [f"{level} {100 * np.mean(found):.1f}" for level, found in scores.items()]
    return f"Countdown, plain pass@1: {', '.join(parts)}."


def main() -> None:
    """Trains, saves and evaluates."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, default=Path("xrpo_jax/assets/policy"))
    options.add_argument("--steps", type=int, default=1800)
    options.add_argument("--rate", type=float, default=4e-3)
    options.add_argument("--width", type=int, default=96)
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--samples", type=int, default=1024, help="for each family of the table")
    options.add_argument("--only_table", action="store_true", help="evaluate what lies in --out")
    flags = options.parse_args()
    began = time.time()
    if not flags.only_table:
        tokenizer = make_tokenizer()
        data = Data(tokenizer, flags.seed)
        config = policy_config(data.ids, flags.width, flags.layers)
        params = train(config, data, flags.steps, flags.rate, flags.seed)
        with tempfile.TemporaryDirectory() as folder:
            save_tokenizer(tokenizer, Path(folder))
            export.save(flags.out, config, params, dtype="bfloat16", tokenizer_dir=folder)
        print(f"{parameters.count(params)} parameters, {time.time() - began:.0f} s of training")
    config, params = hf.load(flags.out)  # what is measured is what was written, bfloat16 and all
    print(evaluate(config, params, flags.out, flags.samples))
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
