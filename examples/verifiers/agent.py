"""An environment of `verifiers`, in an interpreter of its own, that plays one episode.

    python -m venv judge && judge/bin/pip install verifiers
    task: {name: program, options: {command: [judge/bin/python, examples/verifiers/agent.py]}}

The rubric's reward is the episode's. Put your own environment in the place of `SingleTurnEnv`.
"""
