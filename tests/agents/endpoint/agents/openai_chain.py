"""The environment of task `chain` around an unmodified `openai` client."""

import json
import sys

from openai import OpenAI

problem = json.load(sys.stdin)
table, right = problem["reference"]["table"], problem["reference"]["answer"]
messages = [{"role": "user", "content": problem["prompt"]}]
client, verdict, reason = OpenAI(), 0.0, "env_done"
while True:
    reply = client.chat.completions.create(model="policy", messages=messages)
    said = reply.choices[0].message
    verb, digit = said.content[:1], said.content[1:]
    known = len(digit) == 1 and digit in "0123456789"
    if verb == "a" and known:
        verdict = float(int(digit) == right)
        break
    answer = f"{table[int(digit)]}>" if verb == "g" and known else "?>"
    messages += [said, {"role": "user", "content": answer}]
print("the last line counts")
print(json.dumps({"rewards": {"correct": verdict}, "correct": verdict}))
