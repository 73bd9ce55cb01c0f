"""Tunix's GRPOLearner: one whole optimizer step a run, sampling with its own Sampler."""

from __future__ import annotations

import queue
import threading

import jax
import numpy as np
import optax
from bench_pipe import serve
from bench_work import Work, right
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_model import Words, load, mesh


def prepare(raw: dict):
    """Load the model and start the learner; the command that makes its next step."""
    work, options = Work.read(raw), raw["options"]
    prompts = int(options.get("micro_batch", 16)) // work.samples
    width, new_tokens = max(len(prompt) for prompt in work.prompts), max(work.limits)
    here = mesh()
    Role = rl_cluster.Role
    drawn = []

    def reward(prompts, completions, **_):
        return [float(right(text)) for text in completions]

    go, done = queue.Queue(), queue.Queue()

    class Batches:
        """The same prompts every step; the first is looked at before training begins."""

        def __iter__(self):
            batch = {"prompts": np.array(work.texts)}
            while True:
                go.get()
                yield batch
                jax.block_until_ready(nnx.state(model))
                done.put(None)

    model = load(work.model, work.dtype)
    with here:
        cluster = rl_cluster.RLCluster(
            actor=model,
            tokenizer=Words(work.model, work),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh={Role.ACTOR: here, Role.REFERENCE: here, Role.ROLLOUT: here},
                rollout_engine="vanilla",
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adamw(1e-6),
                    eval_every_n_steps=10**9,
                    max_steps=1000,
                    mini_batch_size=len(work.prompts),
                    train_micro_batch_size=prompts,
                    # Sampling takes the whole batch at a time.
                    rollout_micro_batch_size=len(work.prompts),
                    compute_logps_micro_batch_size=prompts,
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=new_tokens,
                    max_prompt_length=width,
                    kv_cache_size=width + new_tokens,
                    temperature=work.temperature,
                    top_p=1.0,
                    eos_tokens=[-1],
                ),
            ),
        )
        learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(num_generations=work.samples, num_iterations=1, beta=0.0),
            reward_fns=reward,
        )

    generate = cluster.generate

    def counted(*arguments, **more):
        found = generate(*arguments, **more)
        drawn.append(sum(len(tokens) for tokens in found.tokens))
        return found

    cluster.generate = counted  # rewards are given texts alone

    def train() -> None:
        try:
            with here:
                learner.train(Batches())
            done.put(RuntimeError("the learner ended"))
        except BaseException as error:
            done.put(error)

    threading.Thread(target=train, daemon=True).start()

    def run() -> dict:
        go.put(None)
        error = done.get()
        if error is not None:
            raise error
        if drawn[-1:] != [work.useful]:
            raise RuntimeError(f"{drawn[-1:]} tokens were drawn; asked for {work.useful}")
        return {"tokens": work.useful}

    return {"run": run}


if __name__ == "__main__":
    serve(prepare)
