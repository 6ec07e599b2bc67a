"""What a post-mortem concludes from what it saw, and how it says it.

Runs in: the driver. Pure functions of plain values, so every rule is tested on invented facts.
Strongest first: a process that is stopped, one that is gone, one that does not answer; then whoever
the run waits for: the learner's late ranks, or the oldest group in flight and what it waits for.

Of a run that did not stall, the error says who, where no process is in trouble. Invariant: nobody
is blamed for waiting for somebody else: a rollout actor that waits for its engine or its verifier
is not the culprit.
"""

from __future__ import annotations

from typing import Any

from async_grpo.runtime.stacks import PART

SLOW_S = 2.0
"""A verifier is named when one response takes it longer than this."""
STALLED = 5
_DISTRIBUTED = ("distributed_c10d.py", "comm/comm.py", "comm/torch.py")


def conclude(facts: dict[str, Any]) -> tuple[str, list[str]]:
    """Say where the run is and who is to blame; and all findings, the most telling first."""
    processes = [process for node in facts["nodes"] for process in node["processes"]]
    found = [*_troubled(processes, facts), *_silent(facts)]
    if facts["exit_code"] == STALLED:  # otherwise nobody need be late
        found += [*_late_ranks(facts, processes), *_oldest(facts, processes)]
    found += [f"earlier: {death}" for death in reversed(facts["deaths"])]
    stalled = facts["exit_code"] == STALLED
    nobody = "nobody stands out: see the stacks" if stalled else facts["error"]
    return f"it was {facts['phase']}; {found[0] if found else nobody}", found


def _troubled(processes: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """Name the processes that the kernel says something about, living ones first."""
    alive = [process for process in processes if process["alive"] and process["trouble"]]
    alive.sort(key=lambda process: not process["trouble"].startswith(("is stopped", "is held")))
    living = {process["role"] for process in processes if process["alive"]}
    gone = [
        process
        for process in processes
        if process["role"] not in living  # so this one is not alive
        and _belongs(process["role"], facts)
        and "verifier" not in process["role"]
    ]
    return [f"{process['name']} {process['trouble']}" for process in [*alive, *gone]]


def _belongs(role: str, facts: dict[str, Any]) -> bool:
    """Whether the role is not of a rollout actor that was replaced."""
    actor = role.partition(PART)[0]
    return not actor.startswith("actor-") or actor in facts["actors"]


def _silent(facts: dict[str, Any]) -> list[str]:
    names = {"queue": "the replay queue", "other_nodes": "another node", "nodes": "this node"}
    return [
        f"{names.get(name, name.removeprefix('actor '))} does not answer ({why})"
        for name, why in facts["silent"].items()
    ]


def _late_ranks(facts: dict[str, Any], processes: list[dict[str, Any]]) -> list[str]:
    """Describe the learner's calls; one late rank alone outside a collective is named."""
    found = []
    for call in facts["learner"]:
        ranks = call["waits_for"].replace("rank ", "learner-").split(", ")
        late = [one for one in processes if one["alive"] and one["role"] in ranks]
        busy = [one for one in late if one["where"] and not _is_in_collective(one)]
        who = busy if len(busy) == 1 and len(late) > 1 else late
        names = ", ".join(
            f"{one['name']}, in {one['where'][0]}" if one["where"] else one["name"] for one in who
        )
        found.append(
            f"{call['call']} has been waiting for {names or call['waits_for'] or 'nobody'} "
            f"for {call['seconds']:.0f} s"
        )
    return found


def _is_in_collective(process: dict[str, Any]) -> bool:
    return any(name in line for line in process["where"] for name in _DISTRIBUTED)


def _oldest(facts: dict[str, Any], processes: list[dict[str, Any]]) -> list[str]:
    """Describe each actor's oldest group in flight and whom it waits for, oldest first."""
    found = []
    for actor_id, actor in facts["actors"].items():
        status = actor["status"]
        if not status or not status["in_flight"]:
            continue
        oldest = status["in_flight"][0]
        who, since = actor_id, oldest["stage_s"]
        if oldest["stage"] == "generating":
            role = f"{actor_id}{PART}engine"
            names = [one["name"] for one in processes if one["role"] == role and one["alive"]]
            who = names[0] if names else f"the engine of {actor_id}"
            doing = f"has been generating group {oldest['group_id']}"
            if status["paused"]:
                doing = "is paused for new weights"
        elif oldest["stage"] == "verifying":
            pid, busy = max(status["verifying"], key=lambda one: one[1], default=(0, 0.0))
            who = f"group {oldest['group_id']} of {actor_id}"
            doing = f"has waited for {oldest['asks']}"
            if busy > SLOW_S and oldest["asks"] == "its verifiers":
                who, since = f"verifier of {actor_id} (pid {pid})", busy
                doing = "has been at one response"
        else:
            doing = f"has had group {oldest['group_id']} in stage {oldest['stage']}"
        found.append((since, f"{who} {doing} for {since:.0f} s"))
    return [sentence for _, sentence in sorted(found, reverse=True)]


# ---- as text ----


def text(facts: dict[str, Any]) -> str:
    """Write summary.txt, which a person reads first."""
    ended = f"exit code {facts['exit_code']}: {facts['meaning']}"
    when = f"{facts['time']}, {facts.get('steps_done')} learner steps done"
    lines = [ended, facts["error"], "", facts["where"], when]
    if "nodes" in facts:
        lines += _section("found", facts.get("findings", []))
        silent = [f"{name}: {why}" for name, why in facts["silent"].items()]
        lines += _section("did not answer", silent)
        lines += _section("replay queue", _queue(facts))
        lines += _section("rollout actors", _actors(facts))
        calls = [
            f"{call['call']}: {call['seconds']:.1f} s, waiting for {call['waits_for'] or 'nobody'}"
            for call in facts["learner"]
        ]
        lines += _section("learner", calls)
        lines += _section("actors that died", facts["deaths"])
        for node in facts["nodes"]:
            seen = [node["note"]] if "note" in node else _processes(node)
            machine = [f"{name}: {value}" for name, value in node.get("machine", {}).items()]
            lines += _section(f"processes on {node['host']}", seen)
            lines += _section(f"machine {node['host']}", machine)
        versions = [f"{name} {value}" for name, value in facts["versions"].items()]
        lines += _section("versions", versions)
    return "\n".join(lines) + "\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"== {title} ==", *(lines or ["nothing"])]


def _queue(facts: dict[str, Any]) -> list[str]:
    queue = facts["queue"]
    if queue is None:
        return ["did not answer; read its journal: async-grpo inspect RUN_DIR"]
    metrics = {name: round(value, 3) for name, value in queue["metrics"].items() if value}
    lines = [f"counts: {queue['counts']}", f"metrics: {metrics}"]
    for actor, groups in queue["in_flight"].items():
        if groups:
            group_id, _, age_s = max(groups, key=lambda one: one[2])
            text = f"{len(groups)} in flight, the oldest (group {group_id}) for {age_s:.1f} s"
            lines.append(f"{actor}: {text}")
    return lines


def _actors(facts: dict[str, Any]) -> list[str]:
    lines = []
    for actor_id, actor in facts["actors"].items():
        status = actor["status"]
        state = "in the set" if actor["serving_set"] else "not in the set"
        silent = "" if status else ", does not answer"
        acknowledged = actor["acknowledged"] or "nothing"
        lines.append(f"{actor_id}: {state}, last acknowledged {acknowledged}{silent}")
        if status:
            paused = " (paused)" if status["paused"] else ""
            lines.append(f"  serves {status['serving']}{paused}; counts {status['counts']}")
            lines += [
                f"  group {one['group_id']} attempt {one['attempt']}: {one['stage']} for "
                f"{one['stage_s']:.1f} s, here for {one['age_s']:.1f} s"
                for one in status["in_flight"]
            ]
            lines += [
                f"  verifier (pid {pid}) at one response for {seconds:.1f} s"
                for pid, seconds in status["verifying"]
            ]
    return lines


def _processes(node: dict[str, Any]) -> list[str]:
    lines = []
    for process in node["processes"]:
        usage = process["usage"]
        line = process["name"]
        if usage:
            line += f": rss {usage['rss']} (peak {usage['rss_peak']}), cpu {usage['cpu_s']:.1f} s, "
            line += f"{usage['open_files']} files, {usage['state']}"
        lines.append(f"{line}, {process['trouble']}" if process["trouble"] else line)
        lines += [f"  {line}" for line in process["where"]]
    return lines
