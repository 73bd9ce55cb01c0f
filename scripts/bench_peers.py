"""This library against transformers, TRL and Tunix on the same work, in turn, on this machine.

    python scripts/bench_peers.py [--envs=runs/peers] [--only='trl:*'] [--rounds=3] [--json=FILE]

Makes an environment for each peer (pinned versions, from the package index; no model hub), starts
the two engines of a comparison, lets each run once to warm up, then lets them run in turn, and
prints medians, ranges and ratios. Needs scripts/fetch_smollm2.sh. `--list` names the comparisons.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import pathlib
import shlex
import statistics
import subprocess
import sys

import bench_environments as environments
from bench import chosen, outcome, write
from bench_machine import describe
from bench_pipe import Engine
from bench_work import pairs

GOALS = {"rollout": 3.0, "variable": 4.0, "step": 3.0}  # what we aim at, as ratios


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """An engine: its environment, its script in peers/, that one's options, and what they are."""

    environment: str
    script: str
    names: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


TRL = Peer(
    environment="trl",
    script="trl_step",
    names=("weights", "micro_batch", "cache", "checkpointing"),
)
PEERS = {
    "transformers": Peer(environment="trl", script="transformers_generate", names=("cache",)),
    "trl": TRL,
    # Parameters and moments in bfloat16, too: half the memory, and updates that round away.
    "trl-bf16": dataclasses.replace(TRL, options=(("weights", "bfloat16"),)),
    "tunix-rollout": Peer(environment="tunix", script="tunix_rollout"),
    "tunix": Peer(environment="tunix", script="tunix_step", names=("micro_batch",)),
}
COMPARISONS = (
    "transformers:rollout:smollm2:bfloat16",
    "transformers:rollout:smollm2:float32",
    "transformers:variable:smollm2:bfloat16",
    "tunix-rollout:rollout:smollm2:bfloat16",
    "tunix-rollout:rollout:smollm2:float32",
    "trl:step:smollm2:bfloat16",
    "trl-bf16:step:smollm2:bfloat16",
    "trl:step:smollm2:float32",
    "tunix:step:smollm2:float32",
    "trl:step:tiny:float32",
    "tunix:step:tiny:float32",
)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; a wrong one ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", type=pathlib.Path, default=pathlib.Path("runs/peers"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench"))
    parser.add_argument("--only", action="append", help="comparisons by name, * for any part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="write everything here as well")
    parser.add_argument(
        "--set", action="append", default=[], help="section.key=value of our engine"
    )
    parser.add_argument(
        "--peer-set", action="append", default=[], help="key=value of the peer's options"
    )
    parser.add_argument(
        "--wrapper", default="", help="a command that has the machine to itself while it runs"
    )
    parser.add_argument("--list", action="store_true", help="name the comparisons and stop")
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error(f"--rounds={given.rounds}; allowed: at least 1")
    patterns = given.only or ["*"]
    given.names = [
        name for name in COMPARISONS if any(fnmatch.fnmatch(name, each) for each in patterns)
    ]
    if not given.names:
        parser.error(f"--only={','.join(patterns)}; allowed: some of {', '.join(COMPARISONS)}")
    given.chosen = chosen(parser, given.set)
    try:
        given.options = pairs("--peer-set", given.peer_set)
    except ValueError as error:
        parser.error(str(error))
    for peer in sorted({name.partition(":")[0] for name in given.names}):
        for name, value in given.options.items():
            if name not in PEERS[peer].names:
                names = ", ".join(PEERS[peer].names) or "nothing"
                parser.error(f"--peer-set={name}={value}; allowed for {peer}: {names}")
    return given


@contextlib.contextmanager
def alone(wrapper: str):
    """Hold the machine by `wrapper cat` for the body; without a wrapper nothing is held."""
    if not wrapper:
        yield
        return
    holder = subprocess.Popen(
        [*shlex.split(wrapper), "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with contextlib.suppress(BrokenPipeError):  # it may have ended before it read
            holder.stdin.write("held\n")
            holder.stdin.flush()
        if holder.stdout.readline() != "held\n":
            raise RuntimeError(f"--wrapper={wrapper} does not run `cat`")
        yield
        if holder.poll() is not None:
            raise RuntimeError(f"--wrapper={wrapper} ended before what it was to hold")
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.close()
        holder.wait()


def measure(ours: Engine, peer: Engine, rounds: int, wrapper: str) -> dict:
    """Both engines' runs: the warm-up, then `rounds` in turn."""
    found = {"ours": [], "peer": []}
    with alone(wrapper):
        first = {"ours": ours.warm(), "peer": peer.warm()}
    for _ in range(rounds):
        with alone(wrapper):
            found["ours"].append(ours.run())
            found["peer"].append(peer.run())
    loaded = {"ours": ours.loaded, "peer": peer.loaded}
    return {"first": first, "loaded": loaded, **found}


def summary(found: dict) -> dict:
    """Rates in useful tokens/s, their ratio with its range over rounds, memory, other work."""
    rates = {
        side: [run["tokens"] / run["seconds"] for run in found[side]] for side in ("ours", "peer")
    }
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["peer"], strict=True)]
    peak = {side: max(run["peak_gb"] for run in found[side]) for side in ("ours", "peer")}
    runs = [*found["ours"], *found["peer"]]
    return {
        "rate": {side: _spread(values) for side, values in rates.items()},
        "seconds": {
            side: _spread([run["seconds"] for run in found[side]]) for side in ("ours", "peer")
        },
        "ratio": _spread(ratios),
        "peak_gb": peak,
        "memory": peak["ours"] / peak["peer"],
        "others": max(run["others"] for run in runs),
        "stolen": max(run["stolen"] for run in runs),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def table(results: dict[str, dict]) -> str:
    """One comparison a line, as a Markdown table for people."""
    lines = [
        "| work | peer | ours, tokens/s | peer, tokens/s | ratio (range) | goal "
        "| memory, GB | others, stolen CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        peer, kind, model, dtype = name.split(":")
        facts = found["summary"]
        ratio, memory = facts["ratio"], facts["peak_gb"]
        lines.append(
            f"| {kind}, {model}, {dtype} | {peer} | {_range(facts['rate']['ours'])} "
            f"| {_range(facts['rate']['peer'])} "
            f"| **{ratio['median']:.2f}** ({ratio['low']:.2f} to {ratio['high']:.2f}) "
            f"| {GOALS[kind]:.0f} | {memory['ours']:.1f} / {memory['peer']:.1f} "
            f"= {facts['memory']:.2f} "
            f"| {100 * facts['others']:.0f} %, {100 * facts['stolen']:.0f} % |"
        )
    return "\n".join(lines)


def _range(spread: dict[str, float]) -> str:
    return f"{spread['median']:,.0f} ({spread['low']:,.0f} to {spread['high']:,.0f})"


def compare(name: str, given: argparse.Namespace) -> dict:
    """Run one comparison."""
    from bench_models import make_work, model_folder  # starts JAX

    peer_name, kind, model, dtype = name.split(":")
    peer = PEERS[peer_name]
    environments.make(peer.environment, given.envs)
    options = dict(peer.options) | given.options
    work = dataclasses.asdict(make_work(kind, model_folder(model, given.out), dtype))
    logs = given.out / "logs"
    slug = name.replace(":", "-")
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(
                Engine(
                    environments.python_of(where, given.envs),
                    script,
                    work | {"options": its_options},
                    logs / f"{slug}-{script}.log",
                )
            )
            for where, script, its_options in (
                ("ours", "ours", given.chosen),
                (peer.environment, peer.script, options),
            )
        ]
        found = measure(*sides, given.rounds, given.wrapper)
    versions = environments.shown(environments.versions(peer.environment, given.envs))
    return found | {
        "summary": summary(found),
        "machine": describe(),
        "versions": versions,
        "settings": {"ours": given.chosen, "peer": options},
    }


def main(argv: list[str]) -> int:
    """Run what is asked for; 1 if a comparison failed, after all others have run."""
    given = arguments(argv)
    if given.list:
        print("\n".join(given.names))
        return 0
    results, failed = {}, False
    for name in given.names:
        print(name, flush=True)
        found = outcome(functools.partial(compare, name, given))
        write(given.json, {name: found})
        if "failure" in found:
            failed = True
            print(f"error: {name}: {found['failure']}", file=sys.stderr)
            continue
        results[name] = found
        print(table(results).splitlines()[-1], flush=True)
    if results:
        print(f"\n{describe()}\n\n{table(results)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
