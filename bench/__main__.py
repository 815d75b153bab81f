"""`python -m bench AREA [--quick] [--json FILE]`: each area is a module of this package with a `main(arguments)`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

SHARED = ("common", "linear_table")
AREAS = sorted(p.stem for p in Path(__file__).parent.glob("[!_]*.py") if p.stem not in SHARED)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in AREAS:
        print(f"usage: python -m bench {{{','.join(AREAS)}}} [--quick] [--json FILE]", file=sys.stderr)
        return 2
    code: int | None = import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
