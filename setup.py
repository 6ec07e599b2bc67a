"""Metadata of the package. Requirements and extras come from packages.toml."""

import sys
from pathlib import Path

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        "async_grpo needs Python 3.11, 3.12 or 3.13, and this is Python {}.{}.".format(
            *sys.version_info[:2]
        )
    )

import tomllib

from setuptools import find_packages, setup

packages = tomllib.loads(
    (Path(__file__).resolve().parent / "packages.toml").read_text(encoding="utf-8")
)

setup(
    name="async_grpo",
    version="0.1.0",
    description=(
        "Asynchronous reinforcement learning of language models with the GRPO family, "
        "on Ray, vLLM and DeepSpeed"
    ),
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["async_grpo", "async_grpo.*"]),
    install_requires=packages["base"],
    extras_require=packages["extras"],
    entry_points={"console_scripts": ["async-grpo = async_grpo.run:main"]},
)
