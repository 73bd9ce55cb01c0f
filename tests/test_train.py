"""The loop of train.py: when it stops, what may go on during an evaluation, what it logs."""

from __future__ import annotations

import dataclasses
import importlib
import time

import numpy as np
import pytest
from fakes import WRONG
from tiny import config as tiny
from tiny import policy

from xrpo_jax import ahead, checkpoint, train
from xrpo_jax.log import read_metrics

pytestmark = pytest.mark.usefixtures("letters_task")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    small = dataclasses.replace(policy.MODEL, num_layers=1)
    return policy.save(tmp_path_factory.mktemp("model") / "policy", small)


def config(model, **settings):
    """A run of GRPO on one device."""
    made = tiny.get_config()
    made.init_from, made.algorithm.name, made.mesh.devices = str(model), "grpo", 1
    made.checkpoint.export, made.compile.cache_dir = "no", "no"
    for name, value in settings.items():
        section, key = name.split("__")
        made[section][key] = value
    return made


def test_a_signal_between_saving_and_the_next_step_loses_nothing(tmp_path, model, monkeypatch):
    """It is heard in the step after, which is saved."""
    heard = []

    class Signals(train._Signals):
        def __enter__(self):
            heard.append(self)
            return super().__enter__()

    class Profiler(train.Profiler):
        def end(self, step, last):
            heard[0].stop = step >= 1
            super().end(step, last)

    monkeypatch.setattr(train, "_Signals", Signals)
    monkeypatch.setattr(train, "Profiler", Profiler)
    train.run(config(model, checkpoint__every=100), str(tmp_path / "run"))
    steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    manager = checkpoint.open_manager(tmp_path / "run", 1)
    assert steps == [0, 1, 2] and manager.latest_step() == 3
    manager.close()


def test_nothing_is_drawn_during_an_evaluation(tmp_path, model, monkeypatch):
    """Not before a step, where a draw is waited for, and not at the end, where it is given up."""
    sources, drawing = [], []

    class Slow(ahead.Ahead):
        def __enter__(self):
            sources.append(self)
            return super().__enter__()

        def _work(self, *arguments):
            time.sleep(0.3)
            super()._work(*arguments)

    def held_out(*arguments):
        pending = sources[0]._pending if sources else None
        drawing.append(pending is not None and not pending.done())
        return {}

    monkeypatch.setattr(ahead, "Ahead", Slow)
    monkeypatch.setattr(train, "held_out", held_out)
    settings = {"train__async_rollouts": 1, "eval__every": 1, "train__tokens": 150}
    train.run(config(model, **settings), str(tmp_path / "run"))
    assert 3 <= len(drawing) < 10 and not any(drawing)


def first_step(folder, model):
    train.run(config(model, train__steps=1), str(folder / "run"))
    return read_metrics(folder / "run" / "metrics.jsonl")[0]


def test_means_over_no_token_are_left_out(tmp_path, model, monkeypatch):
    """All rewards are alike, so that no row is computed."""
    letters = importlib.import_module("xrpo_jax.tasks.letters")
    monkeypatch.setattr(letters.Letters, "rewards", lambda *_: WRONG)
    step = first_step(tmp_path, model)
    assert step["zero_variance"] == 1 and step["loss"] == 0
    absent = ("entropy", "kl_old", "clip_fraction", "old_entropy", "sampler_gap_mean")
    assert not [name for name in (*absent, "sampler_gap_max") if name in step]
    assert all(np.isfinite(step[name]) for name in ("gradient_norm", "tokens_per_second"))


def test_means_over_tokens_are_logged(tmp_path, model):
    step = first_step(tmp_path, model)
    assert step["zero_variance"] < 1 and step["entropy"] > 1 < step["old_entropy"]
    assert 0 < step["sampler_gap_mean"] <= step["sampler_gap_max"] < 1e-4
