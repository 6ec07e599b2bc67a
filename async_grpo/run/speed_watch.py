"""How fast a run is: what was expected of it, what it comes to, and who limits it.

Runs in: the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.observe.bottleneck import AGREE, Bottleneck, BottleneckWatch
from async_grpo.observe.console.console import Console
from async_grpo.observe.throughput import ThroughputSettings
from async_grpo.runtime.parts import part


class SpeedWatch:
    """Says what to expect of a run that has started, and looks at each of its learner steps."""

    def __init__(
        self, config: Config, *, max_num_seqs: int, actors: int, cores: int | None, console: Console
    ) -> None:
        """max_num_seqs: of an engine. cores: that engines and ranks share; None on GPUs."""
        self._console = console
        forecast = part("forecast")
        self._forecast = None
        if forecast is not None:
            self._forecast = forecast(
                config,
                run_dir=Path(config.run.dir),
                max_num_seqs=max_num_seqs,
                actors=actors,
                cores=cores,
                error=console.error,
            )
            if expected := self._forecast.expected():
                console.info(expected)
        setup = ThroughputSettings.configured(config, max_num_seqs=max_num_seqs, cores=cores)
        gain = None if self._forecast is None else self._forecast.gain
        self._bottlenecks = BottleneckWatch(setup, agree=AGREE, gain=gain)

    @property
    def latest(self) -> Bottleneck | None:
        """Who limited the last interval of steps; None before the first."""
        return self._bottlenecks.latest

    def observe(
        self,
        metrics: Mapping[str, float],
        lengths: Sequence[tuple[int, ...]],
        generation_s: Sequence[float],
    ) -> dict[str, float]:
        """Look at a learner step and its groups; what is to be logged of the forecast. Shows a new
        bottleneck.
        """
        predicted = {}
        if self._forecast is not None:
            predicted = self._forecast.observe(metrics, lengths, generation_s)
        if (found := self._bottlenecks.observe(metrics)) is not None:
            self._console.bottleneck(kind=found.kind, text=found.text)
        return predicted

    def end(self) -> dict[str, float]:
        """Record what the run came to; how far that is from what was expected of it."""
        if self._forecast is None:
            return {}
        self._forecast.write()
        return self._forecast.errors()
