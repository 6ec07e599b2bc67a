"""A coordinator beside a real queue, with engines that leave for an evaluation."""

from __future__ import annotations

from tests.support.publishing import Fixture


class Run(Fixture):
    """Its `live` leaves out engines that are away."""

    async def live(self, version: int, digest: str) -> None:
        present = {engine.actor_id for engine in self.coordinator._engines.alive()}
        served = {
            engine.actor_id: engine.label
            for engine in self.members
            if engine.group and engine.actor_id in present
        }
        assert {label.partition(".")[2] for label in served.values()} <= {str(version)}, (
            f"v{version} is declared live, engines serve {served}"
        )
        self.events.append(f"live {version}")


async def publish(run: Run, version: int) -> float:
    run.learner.weight = 1.0 + version
    waited = await run.coordinator.publish(version)
    await run.coordinator.wait()
    return waited
