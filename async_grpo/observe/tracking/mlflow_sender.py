"""Sends to MLflow what an outbox says it does not have.

Runs in: the tracker's sender thread, or `async-grpo report --sync`. Hides MLflow's
client, which is imported when the first call is made.

Invariants: what is sent twice changes nothing, because a point keeps the time of its row, a run
carries a key, and files replace each other; nothing is acknowledged before the server has it,
except for what it refuses for good, which is counted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.observe.tracking.outbox import METRICS, Outbox, OutboxEntry
from async_grpo.observe.tracking.shown import shown
from async_grpo.runtime.provenance import package_versions
from async_grpo.runtime.text import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PARAMETERS_PER_CALL, _PARAMETER_LENGTH, _TAG_LENGTH = 100, 500, 5000
_METRICS_PER_CALL = 900
_RUN_KEY = "async_grpo.key"
_KIND, _TRAINING = "mlflow.experimentKind", "custom_model_development"
"""The tag by which MLflow's pages show an experiment under model training."""
EVERY = "tracking.metrics"
"""The parameter of a run that says whether MLflow gets all metrics."""
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "60",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Unless the user has set them: short time-outs, no retries (the tracker repeats), nothing printed,
no host but the tracking server.
"""


class Delivery:
    """Sends an outbox to MLflow until `stop()`, which is asked between calls; for one thread."""

    def __init__(self, outbox: Outbox, stop: Callable[[], bool] = lambda: False) -> None:
        self._outbox, self._stop = outbox, stop
        self._clients: dict[str, MlflowClient] = {}
        self.refused = 0
        """Points and parameters that were refused for good, and lines that are no rows."""
        self.refusal = ""
        """Why the last one was refused."""

    def connect(self) -> None:
        """Create or continue the current MLflow run."""
        self._connect(self._outbox.entries[-1])

    def send(self, *, earlier: bool = True) -> None:
        """Send what MLflow does not have, the newest run first, then `earlier` ones.

        Raises what MLflow raises, except for what it refuses for good.
        """
        from mlflow.exceptions import MlflowException

        for entry in reversed(self._outbox.entries[0 if earlier else -1 :]):
            client = self._connect(entry)
            try:
                for part in (
                    self._send_parameters,
                    self._send_tags,
                    self._send_rows,
                    self._send_samples,
                    self._send_artifacts,
                    self._register,
                ):
                    if self._stop():
                        return
                    part(client, entry)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    entry.status_sent = None  # `_connect` is to find out whether the run is gone
                raise
        self._outbox.save_sometimes()

    def uri(self, entry: OutboxEntry) -> str:
        """Return the entry's tracking URI."""
        return entry.uri or f"sqlite:///{self._outbox.run_dir / 'mlflow.db'}"

    def _connect(self, entry: OutboxEntry) -> MlflowClient:
        from mlflow.exceptions import MlflowException

        client = self._client(self.uri(entry))
        try:
            if entry.run_id is not None:
                self._tell_status(client, entry)
                return client
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            self._outbox.forget(entry)  # another server than before, or a run that somebody deleted
        experiment = self._experiment(client, entry)
        # One that was created, but whose answer was lost.
        found = client.search_runs(
            [experiment], f"tags.`{_RUN_KEY}` = '{entry.key}'", max_results=1
        )
        tags = {_RUN_KEY: entry.key}
        run = found[0] if found else client.create_run(experiment, entry.created, tags, entry.name)
        entry.run_id, entry.status_sent = run.info.run_id, run.info.status
        self._tell_status(client, entry)
        self._outbox.save()
        return client

    def _tell_status(self, client: MlflowClient, entry: OutboxEntry) -> None:
        """Send the status, before anything else: it is to be right even if time runs out."""
        status = entry.status
        if status == entry.status_sent:
            return
        if status == "RUNNING":
            client.update_run(entry.run_id, status=status)
        else:
            client.set_terminated(entry.run_id, status, entry.ended)
        entry.status_sent = status
        self._outbox.save()

    def _client(self, uri: str) -> MlflowClient:
        if uri not in self._clients:
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            # The schema migration of a new database logs a hundred lines through these, and every
            # failed connection a page.
            for name in ("alembic", "mlflow.tracking.fluent", "mlflow.store.db"):
                logging.getLogger(name).setLevel(logging.WARNING)
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.ERROR)
            # Deprecations inside MLflow, none of which a user can act on.
            warnings.filterwarnings("ignore", module=r"mlflow\.")
            from mlflow import MlflowClient

            if not uri.startswith("http"):
                from mlflow.store.db import utils

                # Else a database that is gone holds the thread for minutes.
                utils.MAX_RETRY_COUNT = 1
            self._clients[uri] = MlflowClient(tracking_uri=uri)
        return self._clients[uri]

    def _experiment(self, client: MlflowClient, entry: OutboxEntry) -> str:
        from mlflow.exceptions import MlflowException

        if (found := client.get_experiment_by_name(entry.experiment)) is not None:
            if _KIND not in found.tags:
                client.set_experiment_tag(found.experiment_id, _KIND, _TRAINING)
            return found.experiment_id
        # A server decides where its artifacts go; a local database would put them into the working
        # directory.
        location = (self._outbox.run_dir / "mlartifacts").as_uri() if entry.uri is None else None
        try:
            return client.create_experiment(
                entry.experiment, artifact_location=location, tags={_KIND: _TRAINING}
            )
        except MlflowException:
            # Another run created it in between.
            if (found := client.get_experiment_by_name(entry.experiment)) is None:
                raise
            return found.experiment_id

    def _send_parameters(self, client: MlflowClient, entry: OutboxEntry) -> None:
        from mlflow.entities import Param

        if entry.parameters_sent:
            return
        for some in _batches(entry.parameters.items(), _PARAMETERS_PER_CALL):
            parameters = [Param(key, text[:_PARAMETER_LENGTH]) for key, text in some]
            self._send_halves(lambda part: client.log_batch(entry.run_id, params=part), parameters)
        entry.parameters_sent = True

    def _send_tags(self, client: MlflowClient, entry: OutboxEntry) -> None:
        from mlflow.entities import RunTag

        if entry.tags_sent or not entry.tags:
            return
        tags = [RunTag(name, value[:_TAG_LENGTH]) for name, value in entry.tags.copy().items()]
        entry.tags_sent = True  # a tag that is set meanwhile is sent the next time
        try:
            self._send_halves(lambda part: client.log_batch(entry.run_id, tags=part), tags)
        except BaseException:
            entry.tags_sent = False
            raise

    def _send_rows(self, client: MlflowClient, entry: OutboxEntry) -> None:
        while not self._stop() and (lines := self._outbox.lines(entry)):
            batch: list[bytes] = []
            points: list[Any] = []
            for line in lines:
                more = self.points(line, entry)
                if batch and len(points) + len(more) > _METRICS_PER_CALL:
                    self._send_batch(client, entry, batch, points)
                    batch, points = [], []
                    if self._stop():
                        return
                batch.append(line)
                points += more
            self._send_batch(client, entry, batch, points)

    def _send_batch(
        self, client: MlflowClient, entry: OutboxEntry, lines: list[bytes], points: list[Any]
    ) -> None:
        for some in _batches(points, _METRICS_PER_CALL):
            self._send_halves(lambda part: client.log_batch(entry.run_id, metrics=part), some)
        self._outbox.acknowledge(entry, lines)

    def _send_halves(self, call: Callable[[list[Any]], object], items: list[Any]) -> None:
        """Send the items together; on a refusal all but those that are to blame."""
        from mlflow.exceptions import MlflowException

        try:
            call(items)
        except MlflowException as error:
            if error.get_http_status_code() != 400:
                raise
            if len(items) == 1:
                self._refuse(one_line(error))
            else:
                self._send_halves(call, items[: len(items) // 2])
                self._send_halves(call, items[len(items) // 2 :])

    def points(self, line: bytes, entry: OutboxEntry) -> list[Any]:
        """Return what MLflow gets of a line of `metrics.jsonl`."""
        from mlflow.entities import Metric

        every = entry.parameters.get(EVERY) == "all"
        try:
            row = json.loads(line)
            step, when = row.pop("step"), round(row.pop("time") * 1000)
            values = {key: float(value) for key, value in row.items() if value is not None}
            names = {key: shown(key, value, every=every) for key, value in values.items()}
            return [
                Metric(name, values[key], when, step)
                for key, name in names.items()
                if name is not None
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._refuse(f"a line of {METRICS} is not a row of metrics: {one_line(error)}")
            return []

    def _refuse(self, reason: str) -> None:
        self.refused, self.refusal = self.refused + 1, reason

    def _send_samples(self, client: MlflowClient, entry: OutboxEntry) -> None:
        rows, position = self._outbox.samples(entry)
        if rows:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(column) for column in columns] for row in rows]
            client.log_dict(entry.run_id, {"columns": columns, "data": data}, "samples.json")
            logged = json.dumps([{"path": "samples.json", "type": "table"}])
            client.set_tag(entry.run_id, "mlflow.loggedArtifacts", logged)
        entry.samples_sent = position

    def _send_artifacts(self, client: MlflowClient, entry: OutboxEntry) -> None:
        while entry.artifacts and not self._stop():
            name = entry.artifacts[0]
            path = self._outbox.run_dir / name
            if path.is_dir():
                place = entry.places.get(name, path.name)
                client.log_artifacts(entry.run_id, str(path), artifact_path=place)
            elif path.exists():
                client.log_artifact(entry.run_id, str(path))
            self._outbox.remove_artifact(entry, name)

    def _register(self, client: MlflowClient, entry: OutboxEntry) -> None:
        """Make a version of each registered model, unless this run has made one."""
        from mlflow.exceptions import MlflowException

        for name, artifact in list(entry.models.items()) if not entry.artifacts else []:
            try:
                try:
                    client.create_registered_model(name)
                except MlflowException as error:
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
                versions = client.search_model_versions(f"run_id = '{entry.run_id}'")
                if all(version.name != name for version in versions):
                    uri = f"{client.get_run(entry.run_id).info.artifact_uri}/{artifact}"
                    tags = {_RUN_KEY: entry.key}
                    client.create_model_version(name, uri, run_id=entry.run_id, tags=tags)
            except MlflowException as error:
                if error.get_http_status_code() != 400:
                    raise
                self._refuse(f"the model could not be registered as {name}: {one_line(error)}")
            del entry.models[name]


def package(model: Path, into: Path) -> None:
    """Write a model of Hugging Face's format as one that `mlflow.pyfunc.load_model` and
    `mlflow.transformers.load_model` load and generate with. Replaces `into`; raises what MLflow and
    transformers raise.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow.transformers

    for name in ("mlflow.transformers", "mlflow.models.model", "mlflow.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # there is no model card to be found
    shutil.rmtree(into, ignore_errors=True)
    versions = package_versions()
    mlflow.transformers.save_model(
        transformers_model=str(model),
        path=str(into),
        task="text-generation",
        pip_requirements=[f"{name}=={versions[name]}" for name in ("transformers", "torch")],
    )


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Cut the items into lists of at most `size`."""
    left = iter(items)
    return iter(lambda: list(islice(left, size)), [])
