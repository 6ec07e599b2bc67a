"""Metadata of the package. Requirements and extras come from packages.toml, recipes of the wheel
from configs/.
"""

import os
import re
import shutil
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
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
REPOSITORY = os.environ.get("ASYNC_GRPO_REPOSITORY", "").rstrip("/")
"""Address of the published source, such as https://host/owner/async_grpo; without one the metadata
has no links (docs/contributing/decisions.md says why).
"""


class BuildWithRecipes(build_py):
    """Copies configs/ into a wheel as async_grpo/recipes; a checkout has configs/ itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            recipes = Path(self.build_lib) / "async_grpo" / "recipes"
            shutil.rmtree(recipes, ignore_errors=True)
            shutil.copytree(
                ROOT / "configs",
                recipes,
                ignore=lambda _, names: [n for n in names if n[-5:] != ".yaml"],
            )


def readme() -> str:
    """README.md, with links into the repository where its address is known."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if REPOSITORY:
        text = re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", text)
    return text


packages = tomllib.loads((ROOT / "packages.toml").read_text(encoding="utf-8"))

setup(
    name="async_grpo",
    version="0.1.0",
    description=(
        "Asynchronous reinforcement learning of language models with the GRPO family, "
        "on Ray, vLLM and DeepSpeed"
    ),
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The async_grpo authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords="reinforcement-learning grpo rlhf rlvr language-models vllm deepspeed ray",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    }
    if REPOSITORY
    else {},
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["async_grpo", "async_grpo.*"]),
    package_data={"async_grpo": ["py.typed", "tools/watch/page.html"]},
    cmdclass={"build_py": BuildWithRecipes},
    install_requires=packages["base"],
    extras_require=packages["extras"],
    entry_points={"console_scripts": ["async-grpo = async_grpo.cli:script"]},
)
