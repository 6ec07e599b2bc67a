"""What the pictures of the report are called, what they mean, and what is said where there is nothing to draw.

Runs in: the report's process.
"""

from __future__ import annotations

from async_grpo.report.page import Plot

PLOTS = (
    Plot(
        "learning", "Reward and held-out accuracy",
        "Above, the mean reward of the groups that each step trained (thin) and its running mean; with filtered groups it is not the reward of the policy on "
        "all prompts. Below, accuracy on problems that are never trained, with 95 % intervals where they were measured: this says whether it learns.",
        "No learner step was logged, and nothing was evaluated.",
    ),
    Plot(
        "lag", "Lag of the trained tokens",
        "How many learner steps old the tokens were when they were trained, as shares of each step's tokens. Lag 0 is on-policy; the bound is "
        "replay.max_staleness.",
        "No learner step told the lag of its tokens.",
    ),
    Plot(
        "length_by_lag", "Response length by lag",
        "Mean tokens per response, by the lag of its oldest token. Long answers take longer and so arrive with more lag: lines that drift apart while the "
        "dashed mean falls point to a bias toward short answers.",
        "No learner step told the length of responses by lag.",
    ),
    Plot(
        "clip_ess", "Clipping and effective sample size by lag",
        "Above, the share of tokens whose ratio was clipped. Below, the effective sample size of the importance ratios as a share: 1 is on-policy, below 0.5 the data "
        "is too old for the step size. Older tokens clip more; a gap that grows says that max_staleness is too large, or the learning rate.",
        "No learner step told clipping or sample size by lag.",
    ),
    Plot(
        "health", "Entropy, gradients and step size",
        "Entropy that falls to 0 early ends exploration; gradient norms above learner.grad_clip are cut; the KL of the updates of a step stays below a few hundredths.",
        "No learner step was logged.",
    ),
    Plot(
        "goodput", "Where tokens and time went",
        "What became of everything that was generated, and what learner and engines did with their time. Only trained tokens and working time bring the run forward.",
        "No learner step was logged.",
    ),
    Plot(
        "timeline", "Timeline",
        "A few learner steps in detail. Engines: groups being generated and scored at each moment. Queue: groups that are ready and wait for their step. "
        "Learner: waiting for its batch, training, waiting for a publication. Weights: from staging until every engine serves them, evaluations and checkpoints. "
        "Another window: python -m async_grpo.report RUN_DIR --steps 100-110.",
        "No learner step was logged.",
    ),
)
