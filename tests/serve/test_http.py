"""The OpenAI server of vLLM over HTTP, once: started as people start it, with the plug-in that it finds installed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import serving
import torch

import baracuda

pytest.importorskip("vllm", reason="make vllm runs these")
pytestmark = pytest.mark.filterwarnings("ignore")
PATIENCE = 1500  # seconds until it answers: it takes half a minute, but for busy machines


def test_the_server_answers_with_the_tokens_of_baracuda_load(tmp_path: Path) -> None:
    out = serving.checkpoint("llama", "w8a8", tmp_path)
    prompt = [5, 6, 7, 8, 9]
    with server(out, tmp_path / "log") as address:
        answer = ask(
            f"{address}/v1/completions",
            model="small",
            prompt=" ".join(f"w{token}" for token in prompt),
            max_tokens=6,
            temperature=0,
            ignore_eos=True,
        )
    with torch.no_grad():
        tokens = baracuda.load(out, fuse=False).generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert answer["choices"][0]["text"].split() == [f"w{token}" for token in tokens[0, len(prompt) :].tolist()]
    assert "run in baracuda on cpu" in (tmp_path / "log").read_text()


@contextmanager
def server(out: Path, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(out), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "small", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "4"]
    # The server has its engine in a process of its own, and can have it nowhere else.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"the server has ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"the server does not answer after {PATIENCE} s:\n{log.read_text()[-4000:]}")


def ask(address: str, **question: Any) -> Any:
    request = urllib.request.Request(address, json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)
