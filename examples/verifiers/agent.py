"""An environment of `verifiers`, in a separate interpreter, that plays one episode.

    python -m venv judge && judge/bin/pip install "verifiers<0.2"
    task: {name: program, options: {command: [judge/bin/python, examples/verifiers/agent.py]}}

The rubric's reward is the episode's. Replace this environment with yours, of one turn or of
several; `preload: [verifiers, datasets]` saves each episode the imports.
"""

import asyncio
import json
import os
import sys

import verifiers as vf
from datasets import Dataset

problem = json.load(sys.stdin)


def exact(completion: list[dict], answer: str) -> float:
    """Say whether the answer is the right one."""
    return float(completion[-1]["content"].strip() == answer)


asked = [{"role": "user", "content": problem["prompt"]}]
rows = Dataset.from_list([{"prompt": asked, "answer": str(problem["reference"])}])
environment = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[exact]))
policy = vf.ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
found = asyncio.run(environment.evaluate(policy, "policy", num_examples=1))
[episode] = found["outputs"]
if episode.get("error"):
    sys.exit(f"{episode['error']}")  # never scored: the group is issued again
right = float(episode["reward"])
print(json.dumps({"rewards": {"correct": right}, "correct": right}))
