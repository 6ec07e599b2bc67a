"""MLflow as a tracker, with what is said of its addresses and the models that it loads.

Runs in: the tracker's sender thread, or `async-grpo report --sync`; `check_server` and `package` in
the driver. Hides MLflow's client, which is imported when the first call is made, and its errors.

Invariant: what is sent twice changes nothing, because a point keeps the time of its row, a run
carries a key, and files replace each other.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from async_grpo.config.schema import Config
from async_grpo.observe.tracking.shown import placed
from async_grpo.observe.tracking.sink import Gone, Point, Refused, RunFacts, TrackingError
from async_grpo.runtime.provenance import package_versions
from async_grpo.runtime.text import one_line, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

CONNECT_TIMEOUT_S = 5.0
_SCHEMES = (
    *("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql"),
    *("databricks", "databricks-uc", "uc"),
)
"""How the addresses of MLflow's own stores begin."""
_PARAMETER_LENGTH, _TAG_LENGTH = 500, 5000
_RUN_KEY = "async_grpo.key"
_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""The tag by which MLflow's pages show an experiment under model training."""
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


@contextmanager
def _answers(*gone: str, failing: str = "") -> Iterator[None]:
    """Raise what MLflow's errors mean. gone: further codes of a run that is not there. failing:
    what a refusal begins with.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", *gone):
            raise Gone(one_line(error)) from error
        if error.get_http_status_code() == 400:
            raise Refused(failing + one_line(error)) from error
        raise


class MlflowSink:
    """See `TrackerSink`."""

    title = "MLflow"
    ends_last = False

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        """Set the address; without one it is a database in `run_dir`."""
        self.address = uri or f"sqlite:///{run_dir / 'mlflow.db'}"
        # A server decides where its artifacts go; a local database would put them into the working
        # directory.
        self._location = None if uri else (run_dir / "mlartifacts").as_uri()

    def where(self) -> str:
        """See `TrackerSink`."""
        uri = without_password(self.address)
        if uri.startswith("http"):
            return f" at {uri}"
        return f"; look at it with: mlflow ui --backend-store-uri {shlex.quote(uri)}"

    def start(self, run: RunFacts) -> str:
        """See `TrackerSink`."""
        experiment = self._experiment(run.experiment)
        has_key = f"tags.`{_RUN_KEY}` = '{run.key}'"
        for found in self._client.search_runs([experiment], has_key, max_results=1):
            return found.info.run_id
        tags = {_RUN_KEY: run.key}
        return self._client.create_run(experiment, run.created, tags, run.name).info.run_id

    @_answers("INVALID_PARAMETER_VALUE")
    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        """See `TrackerSink`."""
        if status == "RUNNING":
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, ended)

    @_answers()
    def log(
        self,
        run_id: str,
        *,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        """See `TrackerSink`; MLflow gets 500 characters of a parameter, and 5,000 of a tag."""
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        pairs = (parameters or {}).items()
        try:
            self._client.log_batch(
                run_id,
                metrics=[Metric(*point._replace(name=placed(point.name))) for point in points],
                params=[Param(name, text[:_PARAMETER_LENGTH]) for name, text in pairs],
                tags=[RunTag(name, text[:_TAG_LENGTH]) for name, text in (tags or {}).items()],
            )
        except MlflowException as error:
            refused = error.get_http_status_code() == 400  # as everything of a deleted run
            if refused and self._client.get_run(run_id).info.lifecycle_stage == "deleted":
                raise Gone(one_line(error)) from error
            raise

    @_answers()
    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """See `TrackerSink`: the table `samples.json`."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self._client.log_dict(run_id, {"columns": columns, "data": data}, "samples.json")
        logged = json.dumps([{"path": "samples.json", "type": "table"}])
        self._client.set_tag(run_id, "mlflow.loggedArtifacts", logged)

    @_answers()
    def put(self, run_id: str, path: Path, place: str) -> None:
        """See `TrackerSink`."""
        if path.is_dir():
            self._client.log_artifacts(run_id, str(path), artifact_path=place)
        else:
            self._client.log_artifact(run_id, str(path))

    def register(self, run_id: str, model: str, place: str) -> None:
        """See `TrackerSink`."""
        from mlflow.exceptions import MlflowException

        client = self._client
        with _answers(failing=f"the model could not be registered as {model}: "):
            try:
                client.create_registered_model(model)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            versions = client.search_model_versions(f"run_id = '{run_id}'")
            if all(version.name != model for version in versions):
                run = client.get_run(run_id)
                tags = {_RUN_KEY: run.data.tags[_RUN_KEY]}
                source = f"{run.info.artifact_uri}/{place}"
                client.create_model_version(model, source, run_id=run_id, tags=tags)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        client = self._client
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return client.create_experiment(name, self._location, _KIND)
            except MlflowException:
                # Another run created it in between.
                if (found := client.get_experiment_by_name(name)) is None:
                    raise
        for tag, value in _KIND.items():
            if tag not in found.tags:
                client.set_experiment_tag(found.experiment_id, tag, value)
        return found.experiment_id

    @cached_property
    def _client(self) -> MlflowClient:
        _set_environment()
        # The schema migration of a new database logs a hundred lines through these, and every
        # failed connection a page.
        for name in ("alembic", "mlflow.tracking.fluent", "mlflow.store.db"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.ERROR)
        # Deprecations inside MLflow, none of which a user can act on.
        warnings.filterwarnings("ignore", module=r"mlflow\.")
        from mlflow import MlflowClient

        if not self.address.startswith("http"):
            from mlflow.store.db import utils

            # Else a database that is gone holds the thread for minutes.
            utils.MAX_RETRY_COUNT = 1
        return MlflowClient(tracking_uri=self.address)


def check_server(config: Config) -> None:
    """Look whether `tracking.uri` can be an address of MLflow's and, where it is one of HTTP,
    whether anything listens there, before processes start. Behind a proxy only the start tells.

    Raises TrackingError; with `tracking.offline_ok` not for a server that does not answer.
    """
    settings, given = config.tracking, config.tracking.uri or ""
    if not settings.mlflow:
        return
    uri, shown = urlsplit(given), f"`tracking.uri` is {without_password(given)}"
    if re.match(r"[\w.-]+:\d+(/|$)", given):
        raise TrackingError(f"{shown}, which has no scheme: write http://{given}")
    scheme, folder = uri.scheme.partition("+")[0], Path(uri.path[1:]).parent
    if scheme and scheme not in _SCHEMES:
        for close in difflib.get_close_matches(scheme, _SCHEMES, n=1, cutoff=0.7):
            raise TrackingError(
                f"`tracking.uri` begins with {scheme}:, which MLflow does not have: is {close}: "
                "meant?"
            )
    if scheme == "sqlite" and not folder.is_dir():
        raise TrackingError(
            f"`tracking.uri` is a SQLite file in {folder}, which is no directory: create it, or "
            "choose another one"
        )
    if uri.scheme not in ("http", "https"):
        return
    try:
        address = uri.hostname or "", uri.port or (443 if uri.scheme == "https" else 80)
    except ValueError as error:
        raise TrackingError(f"{shown}: {error}") from error
    if settings.offline_ok or (uri.scheme in getproxies() and not proxy_bypass(address[0])):
        return
    try:
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise TrackingError(
            f"{shown}, where nothing answers ({error.strerror or error}): start the server, or set "
            "tracking.offline_ok=true to begin without it, or tracking.mlflow=false"
        ) from error


def package(model: Path, into: Path) -> None:
    """Write a model of Hugging Face's format as one that `mlflow.pyfunc.load_model` and
    `mlflow.transformers.load_model` load and generate with. Replaces `into`; raises what MLflow and
    transformers raise.
    """
    _set_environment()
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


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
