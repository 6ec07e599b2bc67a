"""Forks Python programs that find their imports done: `python fork_server.py FD PLAN`.

Runs in: a process of its own, of the program's interpreter, which need not have this package; so it
needs nothing but the standard library. Hides how a forked process becomes a program:

    [environment, stdin, stdout, stderr] --socket FD--> fork -> fork -> the program
    its pid                             <--------------/         (a child of whoever adopts orphans)

The one in between ends at once, so that the environment child, which adopts what is left in its
tree, waits for the program as for one that it has begun itself.

Invariants: a program has its own environment, also in /proc, where its episode's key is looked for;
it dies with the environment child; its random numbers, of `random`, numpy and torch, are its own.
Threads of imported modules do not live on in programs.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time

KEY = "OPENAI_API_KEY"
LARGEST = 64 * 1024
_PR_SET_PDEATHSIG = 1
_ADOPTED_S = 5.0


def main() -> None:
    """Import, say so, and fork until the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    plan = json.loads(sys.argv[2])
    place = _place_of_key()
    sys.path[0] = _directory(plan["arguments"])
    try:
        for module in plan["modules"]:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - of the user's modules, for whoever waits
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        return
    gc.freeze()
    control.send(json.dumps({"ready": len(plan["modules"])}).encode())
    while True:
        message, outputs, _, _ = socket.recv_fds(control, LARGEST, 3)
        if not message:
            return
        told, tell = os.pipe()
        between = _fork(control)
        if between == 0:
            pid = _fork(control)
            if pid == 0:
                os.close(told)
                os.close(tell)
                _become(json.loads(message), outputs, control, place)
                _run(plan["arguments"])
            if pid > 0:
                os.write(tell, str(pid).encode())
            os._exit(0)
        os.close(tell)
        if between > 0:
            os.waitpid(between, 0)  # then the program has been adopted, and can be waited for
            if said := os.read(told, 32):
                control.send(json.dumps({"pid": int(said)}).encode())
        for one in (told, *outputs):
            os.close(one)


def _fork(control: socket.socket) -> int:
    """Fork; say why it cannot be, and return -1."""
    try:
        return os.fork()
    except OSError as error:
        control.send(json.dumps({"error": f"a program cannot be forked: {error}"}).encode())
        return -1


def _become(variables: dict, outputs: list, control: socket.socket, place: int) -> None:
    """Take this process's own session, files and environment."""
    parent = int(variables.pop("parent"))
    waited = time.monotonic() + _ADOPTED_S
    while os.getppid() != parent:
        if time.monotonic() > waited:
            os._exit(70)  # nobody has adopted it: who began it is gone
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(70)
    os.setsid()
    for at, one in enumerate(outputs):
        os.dup2(one, at)
        os.close(one)
    control.close()
    ctypes.memmove(place, variables[KEY].encode(), len(os.environ[KEY]))
    os.environ.update(variables)


def _place_of_key() -> int:
    """Return where the key stands in this process's first environment, which /proc shows."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    return getenv(KEY.encode())


def _directory(arguments: list) -> str:
    return os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.abspath(arguments[0]))


def _run(arguments: list) -> None:
    """Run a script, or a module behind `-m`, as the interpreter would, to the end of this process.
    What was imported is not torn down: that takes longer than many a program.
    """
    code = 0
    try:
        _reseed()
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = _code_of(error)
    except BaseException:  # noqa: BLE001 - said as the interpreter says it
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _reseed() -> None:
    """Give this process random numbers of its own: those of `random` are, but others' are not."""
    for name in ("numpy.random", "torch"):
        if name in sys.modules:
            sys.modules[name].seed()


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
