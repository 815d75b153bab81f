"""Fill the pages from the code, build them strictly, and follow every link of what came out."""

from __future__ import annotations

import subprocess
import sys
import time

from .fill import PAGES, ROOT, SITE, fill, sources
from .links import broken, unplaced


def main() -> int:
    started = time.perf_counter()
    fill(PAGES)
    build = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=False)
    if build.returncode:
        return build.returncode
    problems = [*unplaced(ROOT / "zensical.toml", sources()), *broken(SITE)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE}, {time.perf_counter() - started:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
