"""How large the code is, for whoever reads it: `make lint` prints it. No figure here is a limit."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_FUNCTION = 60


def main() -> None:
    """Print the lines by folder, the largest files, and the longest functions."""
    for folder in ("async_grpo", "benchmarks", "tests"):
        lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
        print(f"{folder}: {sum(lines.values()):,} lines in {len(lines)} files")
        if folder == "async_grpo":
            parts = Counter[str]()
            for path, count in lines.items():
                parts[path.relative_to(ROOT / folder).parts[0].removesuffix(".py")] += count
            print("  " + ", ".join(f"{name} {count:,}" for name, count in parts.most_common()))
            largest = sorted(lines, key=lambda path: -lines[path])[:5]
            print("  " + ", ".join(f"{one.relative_to(ROOT)} {lines[one]}" for one in largest))
            print("  " + ", ".join(_long_functions(list(lines))))


def _long_functions(paths: list[Path]) -> list[str]:
    found = [
        (node.end_lineno - node.lineno + 1, node.name)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    long = sorted((one for one in found if one[0] > LONG_FUNCTION), reverse=True)
    return [f"{len(long)} functions over {LONG_FUNCTION} lines"] + [
        f"{name} {count}" for count, name in long[:3]
    ]


if __name__ == "__main__":
    main()
