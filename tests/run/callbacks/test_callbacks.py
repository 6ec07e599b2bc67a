"""Delivery of events, errors in callbacks, and the callbacks that a configuration names."""

from __future__ import annotations

import math
import sys
import threading
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError, SetupError
from async_grpo.run.callbacks.base import Callback, CallbackFailed, Callbacks
from async_grpo.run.callbacks.early_stopping import MOST_WITHOUT, EarlyStopping
from async_grpo.run.callbacks.registry import given_callbacks, make_callbacks
from async_grpo.run.trainer import Trainer


class Keeps(Callback):
    def __init__(self, fails_at: int = -1, again: bool = False) -> None:
        self.heard: list[Any] = []
        self._fails_at, self._again = fails_at, again

    def on_step(self, trainer: Any, result: dict[str, Any]) -> None:
        self.heard.append((threading.get_ident(), result))
        if self._again:
            trainer.callbacks.tell("on_step", {"again": True})
            trainer.callbacks.deliver(trainer)
            self._again = False
        if result == self._fails_at:
            raise KeyError("x")


class NoCallback:
    pass


class Exits(Callback):
    def __init__(self) -> None:
        sys.exit("a script")


def test_events_of_all_threads_are_delivered_in_order_by_the_one_that_asks() -> None:
    first, second = Keeps(), Keeps()
    callbacks = Callbacks([first, second])

    def tell() -> None:
        for number in range(100):
            callbacks.tell("on_step", number)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join(10)
    assert first.heard == []
    callbacks.deliver(None)
    here = threading.get_ident()
    assert first.heard == second.heard == [(here, number) for number in range(100)]


def test_what_a_callback_causes_is_delivered_after_it() -> None:
    one, trainer = Keeps(again=True), SimpleNamespace()
    trainer.callbacks = callbacks = Callbacks([one])
    callbacks.tell("on_step", 1)
    callbacks.deliver(trainer)
    assert [result for _, result in one.heard] == [1, {"again": True}]


def test_an_error_ends_the_run_with_the_name() -> None:
    callbacks = Callbacks([Keeps(fails_at=1)])
    callbacks.tell("on_step", 1)
    with pytest.raises(CallbackFailed, match=r"test_callbacks:Keeps raised in on_step: KeyError"):
        callbacks.deliver(None)
    callbacks.tell("on_step", 2)
    callbacks.deliver(None)  # as when the run is taken down


def test_an_error_is_counted_where_that_is_asked_for() -> None:
    said: list[str] = []
    broken, sound = Keeps(fails_at=1), Keeps()
    callbacks = Callbacks([broken, sound], "count", error=said.append)
    for number in (1, 2, 1):
        callbacks.tell("on_step", number)
    callbacks.deliver(None)
    assert callbacks.errors == len(said) == 2 and "counted as callbacks/errors" in said[0]
    assert [result for _, result in sound.heard] == [1, 2, 1]


class Raises(Callback):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def on_step(self, trainer: Any, result: dict[str, Any]) -> None:
        raise self._error


@pytest.mark.parametrize("on_error", ["fail", "count"])
def test_what_ends_the_run_is_no_error_of_the_callback(on_error: Any) -> None:
    callbacks = Callbacks([Raises(FaultBudgetSpent("the disk is full"))], on_error)
    callbacks.tell("on_step", {})
    with pytest.raises(FaultBudgetSpent, match=r"^the disk is full$"):
        callbacks.deliver(None)


def test_what_the_trainer_refuses_is_an_error_of_the_callback() -> None:
    said: list[str] = []
    callbacks = Callbacks([Raises(RunError("no room"))], "count", error=said.append)
    callbacks.tell("on_step", {})
    callbacks.deliver(None)
    assert callbacks.errors == 1 and "Raises raised in on_step: RunError: no room" in said[0]
    callbacks = Callbacks([Raises(RunError("no room"))])
    callbacks.tell("on_step", {})
    with pytest.raises(CallbackFailed, match="Raises raised in on_step"):
        callbacks.deliver(None)


def test_all_hear_an_event_whoever_of_them_fails_and_each_has_its_own_result() -> None:
    class Changes(Keeps):
        def on_step(self, trainer: Any, result: dict[str, Any]) -> None:
            super().on_step(trainer, dict(result))
            result["loss"] = None

    first, broken, last = Changes(), Raises(KeyError("x")), Keeps()
    callbacks = Callbacks([first, broken, last])
    result = {"loss": 1.0}
    callbacks.tell("on_step", result)
    with pytest.raises(CallbackFailed):
        callbacks.deliver(None)
    assert first.heard[0][1] == last.heard[0][1] == result == {"loss": 1.0}


def test_callbacks_are_made_by_name() -> None:
    made = make_callbacks({"early_stopping": {"patience": 2}, f"{__name__}:Keeps": {"fails_at": 3}})
    assert [type(one) for one in made] == [EarlyStopping, Keeps] and made[1]._fails_at == 3


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "early_stoping",
            {},
            "there is no callback early_stoping; use early_stopping or webhook, or",
        ),
        ("no_module:Any", {}, "no_module:Any cannot be made: ModuleNotFoundError"),
        (f"{__name__}:Nothing", {}, "cannot be made: AttributeError"),
        (f"{__name__}:NoCallback", {}, "is no subclass of async_grpo.Callback"),
        ("early_stopping", {"patince": 1}, "unexpected keyword argument 'patince'"),
        ("early_stopping", {"mode": "up"}, "mode is 'up'; it is max or min"),
        (f"{__name__}:Exits", {}, "Exits cannot be made: SystemExit: a script"),
        (
            "early_stopping",
            {"metric": "train/lag_mean"},
            "ValueError: metric train/lag_mean is called train/staleness_mean now",
        ),
        ("early_stopping", {"metric": 3}, "metric is 3; it is a name"),
        ("early_stopping", {"patience": 2.5}, "patience is 2.5; it is a whole number"),
        ("early_stopping", {"min_delta": -0.1}, "min_delta is -0.1; it is a finite number"),
        ("early_stopping", {"min_delta": math.nan}, "min_delta is nan; it is a finite number"),
        ("early_stopping", {"target": "0.5"}, "target is '0.5'; it is a finite number, or null"),
        ("early_stopping", {"target": math.inf}, "target is inf; it is a finite number, or null"),
        ("metric_stream", {"to": "a"}, r"was removed: metrics\.jsonl has every line"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(name: str, options: dict, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        make_callbacks({name: options})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            EarlyStopping(),
            r"is a list of callbacks: write callbacks=\[\.\.\.\], not <.*EarlyStopping",
        ),
        (EarlyStopping, r"is a list of callbacks: write callbacks=\[\.\.\.\], not <class"),
        (None, r"is a list of callbacks: write callbacks=\[\.\.\.\], not None"),
        ([EarlyStopping], r"has the class EarlyStopping; give an object: EarlyStopping\(\.\.\.\)"),
        ([Keeps(), "early_stopping"], "has 'early_stopping', which is no async_grpo.Callback"),
    ],
)
def test_what_a_script_gives_that_is_no_callback_is_one_sentence(given: Any, says: str) -> None:
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}})
    with pytest.raises(SetupError, match=says):
        Trainer(config, callbacks=given)


def test_callbacks_that_a_script_gives_are_kept_in_their_order() -> None:
    first, second = Keeps(), EarlyStopping()
    assert given_callbacks(one for one in (first, second)) == [first, second]


class Trains:
    """A trainer, as far as early stopping is concerned."""

    def __init__(self, every_steps: int = 1) -> None:
        self.config = SimpleNamespace(evaluation=SimpleNamespace(every_steps=every_steps))
        self.why: str | None = None

    def finish(self, why: str) -> None:
        self.why = self.why or why


def stopped_after(values: list[float], metric: str = "m", **options: Any) -> int | None:
    """The number of values after which the run is finished."""
    stopping, trainer = EarlyStopping(metric, **options), Trains()
    stopping.on_start(trainer)
    for number, value in enumerate(values, 1):
        stopping.on_step(trainer, {"training_iteration": number, "m": value})
        if trainer.why is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "options", "after"),
    [
        ([1, 2, 3, 4, 5], {"patience": 1}, None),
        ([1, 2, 2, 2, 3], {"patience": 2}, 4),
        ([1, 2, 1, 3, 2, 2], {"patience": 2}, 6),
        ([3, 2, 2, 1, 1, 1], {"patience": 2, "mode": "min"}, 6),
        ([1, 1.1, 1.2, 2.0, 2.1], {"patience": 2, "min_delta": 0.5}, 3),
        ([0.1, 0.5, 0.9], {"target": 0.5}, 2),
        ([0.9, 0.4, 0.1], {"target": 0.4, "mode": "min"}, 2),
    ],
)
def test_early_stopping_counts_values_without_improvement(
    values: list[float], options: dict[str, Any], after: int | None
) -> None:
    assert stopped_after(values, **options) == after


def test_early_stopping_looks_at_evaluations_too() -> None:
    stopping, trainer = EarlyStopping(patience=1), Trains()
    for step in (10, 20):
        stopping.on_step(trainer, {"training_iteration": step, "train/loss": 1.0})
        stopping.on_evaluation(trainer, step, {"eval/accuracy_greedy": 0.5})
    assert trainer.why == (
        "eval/accuracy_greedy has not improved on 0.5 in 1 values, the last 0.5 at step 20"
    )


def test_a_method_of_before_is_answered() -> None:
    with pytest.raises(TypeError, match=r"Old\.on_publication is called on_weight_sync now"):
        type("Old", (Callback,), {"on_publication": lambda *event: None})


def test_a_callback_may_be_generic_and_take_words_of_its_class() -> None:
    class Named(Callback):
        def __init_subclass__(cls, *, name: str = "", **named: Any) -> None:
            super().__init_subclass__(**named)
            cls.name = name

    class Typed(Callback, Generic[TypeVar("T")]):
        pass

    assert type("Mine", (Named,), {}, name="mine").name == "mine"
    assert isinstance(Typed[int](), Callback)
    with pytest.raises(TypeError, match="word"):
        type("Wrong", (Callback,), {}, word=1)


def test_a_metric_that_never_comes_is_a_mistake() -> None:
    stopping, trainer = EarlyStopping("rollout/scor"), Trains()
    result = {"training_iteration": 1, "rollout/score": 1.0}
    for _ in range(MOST_WITHOUT - 1):
        stopping.on_step(trainer, result)
    with pytest.raises(ValueError, match="called rollout/scor; there are rollout/score"):
        stopping.on_step(trainer, result)
    with pytest.raises(ValueError, match=r"evaluation.every_steps is 0; set it"):
        EarlyStopping().on_start(Trains(every_steps=0))


def test_a_metric_that_comes_now_and_then_is_none() -> None:
    stopping, trainer = EarlyStopping("m", patience=2), Trains()
    stopping.on_step(trainer, {"training_iteration": 1, "m": 1.0})
    for step in range(2, 20):
        stopping.on_step(trainer, {"training_iteration": step})
    assert trainer.why is None
