"""Imported first, this spares a process with a model an import that it has no use for: starting is
mostly importing.

Runs in: learner ranks, rollout actors and EngineCore. transformers imports scikit-learn wherever it
is installed (MLflow brings it), for a threshold of assisted generation, which nothing here uses;
with SciPy and pandas behind it, that is a second or more in each process. So transformers is told
that it is not there. Whoever imports it otherwise, a verifier for instance, gets it.
"""

from __future__ import annotations

import transformers.utils

transformers.utils.is_sklearn_available = lambda: False
