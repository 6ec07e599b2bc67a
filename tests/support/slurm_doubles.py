"""Doubles of a Slurm cluster and of Ray for shell scripts: small programs on PATH that write down
how they were called, in order.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import wait_until, wait_until_gone

RECORD = r"""#!/bin/bash
record() {
    local auth="${RAY_AUTH_MODE-}:${RAY_AUTH_TOKEN-}"
    printf -v line '%q ' "$$" "${0##*/}" "${RAY_ADDRESS-}" "$auth" "$@"
    echo "$line" >>"$CALLS"  # at once, since others write too
}
record "$@"
"""
DOUBLES = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '[[ $1 != show ]] || printf "%s\\n" $NODES\n',
    "getent": 'echo "10.0.0.5        STREAM $2"; echo "10.0.0.5        DGRAM"\n',
    "sleep": "exec /bin/sleep 0.02\n",
    "ray": """
case "$*" in
    status*) [[ -f $CALLS.asked && -f $CALLS.head ]] || { touch "$CALLS.asked"; exit 1; } ;;
    *--head*) [[ -z $RAY_FAILS ]] || exit 1; touch "$CALLS.head"; exec tail -f /dev/null ;;
    start*) exec tail -f /dev/null ;;
esac
""",
    "python": """
trap 'record TERM; asked=yes' TERM
until [[ $NODES != *" "* ]] || grep -q " ray .* start --address" "$CALLS"; do /bin/sleep 0.02; done
[[ -z $ENDS ]] || exit "$DRIVER_CODE"
touch "$CALLS.training"
while [[ -z $asked ]]; do /bin/sleep 0.02; done
for ((i = 0; i < ${SLOW:-0}; i++)); do /bin/sleep 0.02; done
exit "$DRIVER_CODE"
""",
}
"""What each does once it has written its call down. Ray's head answers when asked again; the run
waits for the workers."""
OF_THE_ENVIRONMENT = ("ray", "python")
"""What `activate` puts on PATH."""


@dataclass(frozen=True)
class Call:
    """One call of a double, and what it found in the environment."""

    pid: int
    program: str
    ray_address: str
    auth: str
    words: list[str]

    def __str__(self) -> str:
        return " ".join([self.program, *self.words])


class Job:
    """A batch script that Slurm has started, in the directory `home`."""

    def __init__(self, script: Path, *words: str, home: Path, nodes: str, **variables: str) -> None:
        """nodes: names of the allocation's nodes; variables: of the job and of the doubles."""
        self._calls = home / "calls"
        slurm, environment = home / "slurm", home / ".venv" / "bin"
        for name, body in DOUBLES.items():
            folder = environment if name in OF_THE_ENVIRONMENT else slurm
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(RECORD + body)
            (folder / name).chmod(0o755)
        (environment / "activate").write_text(f'export PATH="{environment}:$PATH"\n')
        given = {
            "PATH": f"{slurm}:/usr/bin:/bin",
            "CALLS": str(self._calls),
            "NODES": nodes,
            "SLURM_SUBMIT_DIR": str(home),
            "SLURM_JOB_ID": "812345",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_CPUS_PER_TASK": "64",
            "SLURM_GPUS_ON_NODE": "8",
            "DRIVER_CODE": "0",
            **dict.fromkeys(("SLOW", "ENDS", "RAY_FAILS"), ""),
        }
        self.process = subprocess.Popen(
            ["bash", str(script), *words],
            env=given | variables,
            cwd=home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # a shell cannot trap what was ignored when it began, as SIGINT is in a background job
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def calls(self) -> list[Call]:
        """Every call until now, in order."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        found = []
        for line in lines:
            pid, program, address, auth, *words = shlex.split(line)
            found.append(Call(int(pid), program, address, auth, words))
        return found

    def signal(self, *numbers: signal.Signals) -> None:
        """Send these to the batch shell: the first one while the run trains, the others while it
        saves.
        """
        training = self._calls.with_name("calls.training").exists
        for number, condition in zip(numbers, [training, self._saving, self._saving], strict=False):
            try:
                wait_until(condition, 20, "the run's next phase")
            except AssertionError:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise
            self.process.send_signal(number)

    def _saving(self) -> bool:
        return any(call.words == ["TERM"] for call in self.calls())

    def end(self) -> tuple[int, str]:
        """Exit code and output, once it has ended and nothing of it is left."""
        try:
            said, _ = self.process.communicate(timeout=30)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        wait_until_gone([call.pid for call in self.calls()])
        return self.process.returncode, said
