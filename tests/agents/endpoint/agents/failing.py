"""Programs that go wrong, each in its way; without any package."""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

kind = sys.argv[1]
messages = [{"role": "user", "content": "2:7>"}]


def ask() -> dict:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]


def asked_too_much() -> bool:
    """Ask behind more than there is room for; whether that was refused."""
    messages.append({"role": "user", "content": "x" * 500})
    try:
        ask()
    except urllib.error.HTTPError as error:
        return error.code == 400
    return False


def numbers_of_others() -> dict:
    numbers = {}
    if "numpy.random" in sys.modules:
        numbers["numpy"] = int(sys.modules["numpy.random"].randint(10**9))
    if "torch" in sys.modules:
        numbers["torch"] = float(sys.modules["torch"].rand(1))
    return numbers


def reader_mb() -> float:
    with open(f"/proc/{os.getppid()}/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


RIGHT = json.dumps({"rewards": {"correct": 1.0}, "correct": 1})
if kind not in ("never_asks", "asks_too_much", "hides_it") and "OFFLINE" not in os.environ:
    messages.append(ask())
if kind == "exits":
    print("Traceback\nBoom", file=sys.stderr)
    print(RIGHT)
    sys.exit(3)
elif kind == "says_nothing":
    print("all right")
elif kind == "never_asks":
    print(RIGHT)
elif kind == "prints_much":
    for _ in range(64):
        print("x" * 2**16)
    print(RIGHT)
elif kind == "prints_256_mb":
    before = reader_mb()
    for _ in range(128):
        sys.stdout.write("x" * 2**20)
        sys.stderr.write("x" * 2**20)
    grown = {"grown_mb": reader_mb() - before}
    print("\n" + json.dumps({"rewards": {"correct": 1.0}, "metrics": grown}))
elif kind == "result_of_line_ends":
    answer = "a\u2028b\u2029c\x85d"
    result = {"rewards": {"correct": 1.0}, "correct": 1, "answer": answer}
    sys.stdout.buffer.write(b"half\r" + json.dumps(result, ensure_ascii=False).encode())
elif kind == "result_of_size":
    result = json.loads(RIGHT) | {"answer": ""}
    result["answer"] = "x" * (int(sys.argv[2]) - len(json.dumps(result)))
    print("before\n" + json.dumps(result))
elif kind == "reserves":
    map_memory = ctypes.CDLL(None).mmap
    map_memory.restype = ctypes.c_void_p
    private_anonymous_noreserve = 0x4022
    reserved = map_memory(
        None, ctypes.c_size_t(20 * 2**30), 0, private_anonymous_noreserve, -1, ctypes.c_long(0)
    )
    print(RIGHT if reserved != ctypes.c_void_p(-1).value else "nothing is reserved")
elif kind == "eats":
    eaten = [b"x" * 2**26 for _ in range(24)]
    print(RIGHT)
elif kind == "kills_itself":
    os.kill(os.getpid(), signal.SIGKILL)
elif kind == "unknown_reward":
    print(json.dumps({"rewards": {"other": 1.0}}))
elif kind == "hangs":
    time.sleep(600)
elif kind == "hides_and_hangs":
    with open(sys.argv[2], "a") as pids:
        pids.write(f"{os.getpid()} {os.getppid()}\n")
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
elif kind == "asks_for_ever":
    while True:
        messages.append({"role": "user", "content": "4>"})
        messages.append(ask())
elif kind in ("compacts", "compacts_and_exits"):
    assert asked_too_much()
    messages = [{"role": "user", "content": "9>"}]
    ask()
    print(RIGHT)
    sys.exit(3 if kind == "compacts_and_exits" else 0)
elif kind in ("asks_too_much", "hides_it"):
    assert asked_too_much()
    print(RIGHT)
    sys.exit("too much" if kind == "asks_too_much" else 0)
elif kind == "leaves_stranger":
    stranger = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
    with open(sys.argv[2], "w") as pid:
        pid.write(str(stranger.pid))
    print(RIGHT)
elif kind == "leaves_plain":
    subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(RIGHT)
elif kind == "tells":
    with open(f"/proc/{os.getpid()}/environ") as environment:
        key_in_proc = "OPENAI_API_KEY=" + os.environ["OPENAI_API_KEY"] in environment.read()
    about = {
        "arguments": sys.argv,
        "directory": os.getcwd(),
        "A": os.environ["A"],
        "variables": sorted(set(os.environ) - {"LC_CTYPE"}),
        "name": __name__,
        "file": __file__,
        "path": sys.path[0],
        "by_chance": random.random(),
        **numbers_of_others(),
        "key_in_proc": key_in_proc,
    }
    with open(sys.argv[2], "w") as told:
        json.dump(about, told)
    sys.exit("the end")
elif kind in ("leaves", "leaves_and_hangs"):
    code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    with open(sys.argv[2], "a") as pids:
        for _ in range(8):
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            pids.write(child.stdout.readline().decode())
        pids.write(f"{os.getpid()}\nall\n" if kind == "leaves_and_hangs" else "")
    time.sleep(600 if kind == "leaves_and_hangs" else 0)
    print(RIGHT)
