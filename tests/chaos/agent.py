"""A program of the chaos runs: one to three turns, some waiting, and a process that it leaves
behind. Without any package, so that 64 of them fit on two cores.
"""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
import zlib

problem = json.load(sys.stdin)
subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
messages, said = [{"role": "user", "content": problem["prompt"]}], ""
for _ in range(3):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        message = json.load(reply)["choices"][0]["message"]
    said += message["content"]
    if zlib.crc32(said.encode()) & 2:
        break
    time.sleep(random.random())
    messages += [message, {"role": "user", "content": "1+1="}]
right = float(zlib.crc32(said.encode()) & 1)
print(json.dumps({"rewards": {"correct": right}, "correct": right}))
