"""An agent of pydantic-ai as it is: the library runs the loop, and calls the tool.

    python -m venv agent && agent/bin/pip install "pydantic-ai-slim[openai]"
    task: {name: program, options: {command: [agent/bin/python, examples/pydantic_ai/agent.py]}}

The policy is found by OPENAI_BASE_URL and OPENAI_API_KEY. `preload: [pydantic_ai.models.openai]`
saves each episode the imports.
"""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

problem = json.load(sys.stdin)
agent = Agent(OpenAIChatModel("policy"), instructions="Answer with the number alone.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


answer = agent.run_sync(problem["prompt"]).output
right = float(answer.strip() == str(problem["reference"]))
print(json.dumps({"rewards": {"correct": right}, "correct": right}))
