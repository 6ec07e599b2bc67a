"""The environment of task `chain` without any package: it is there in a moment."""

import json
import os
import sys
import urllib.error
import urllib.request

problem = json.load(sys.stdin)
table, right = problem["reference"]["table"], problem["reference"]["answer"]
messages = [{"role": "user", "content": problem["prompt"]}]
verdict = 0.0
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            said = json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError:  # no room left
        break
    verb, digit = said["content"][:1], said["content"][1:]
    known = len(digit) == 1 and digit in "0123456789"
    if verb == "a" and known:
        verdict = float(int(digit) == right)
        break
    answer = f"{table[int(digit)]}>" if verb == "g" and known else "?>"
    messages += [said, {"role": "user", "content": answer}]
print(json.dumps({"rewards": {"correct": verdict}, "correct": verdict}))
