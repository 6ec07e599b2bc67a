"""install.py, which is no module of a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).resolve().parents[2] / "install.py"
_spec = importlib.util.spec_from_file_location("async_grpo_install", _FILE)
assert _spec is not None and _spec.loader is not None
installer = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = installer  # dataclasses look their module up there
_spec.loader.exec_module(installer)
