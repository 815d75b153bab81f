"""What somebody changes in a checkpoint is found: by the checksums, and where those were renewed, by the original."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import quantize_checkpoint, report, verify
from baracuda.flow.checkpoint.manifest import read_manifest
from baracuda.flow.checkpoint.tensorfile import TensorFile, read_tensors, write_tensors

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static SmoothQuant checkpoint: every kind of tensor and file is there."""
    folder = tmp_path_factory.mktemp("trust")
    models.save("qwen2", folder / "model", torch.bfloat16)
    (folder / "model" / "tokenizer.json").write_text('{"a": 1}')
    (folder / "model" / "README.md").write_text("read me")
    tokens = models.tokens(folder / "tokens.safetensors")
    scheme = {"scheme": "w8a8-smoothquant", "activations": "static"}
    quantize_checkpoint(folder / "model", folder / "out", calibration=tokens, **scheme)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def source(kept: Path) -> Path:
    return kept / "model"


@pytest.fixture
def out(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept / "out", tmp_path / "out"))


def found(out: Path, against: Path | None = None) -> set[tuple[str, str]]:
    return {(finding.code, finding.where) for finding in verify(out, against)}


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = read_tensors(path)
    write_tensors(path, tensors | {name: change(tensors[name])}, {"format": "pt", "made_by": "baracuda quantize"})


def test_a_smoothed_checkpoint_is_computed_again_and_equal(out: Path, source: Path) -> None:
    assert verify(out) == [] and verify(out, source) == []


def test_the_checksums_are_those_of_sha256sum(out: Path) -> None:
    listed = read_manifest(out)
    assert listed is not None and set(listed) == {
        path.name for path in out.iterdir() if path.name not in ("README.md", "baracuda.sha256")
    }
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--strict", "baracuda.sha256"], cwd=out, check=True, capture_output=True)


def test_every_changed_byte_is_found_by_its_checksum(out: Path) -> None:
    chance = random.Random(5)
    files = [path for path in sorted(out.iterdir()) if path.name != "README.md"]
    for path in files:
        data = path.read_bytes()
        for _ in range(6):
            at = chance.randrange(len(data))
            changed = bytes((data[at] ^ chance.randrange(1, 256),))
            path.write_bytes(data[:at] + changed + data[at + 1 :])
            assert verify(out), (path.name, at)
        path.write_bytes(data)
    assert verify(out) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5},
        {"hidden_act": "relu"},
        {"rms_norm_eps": 1e-3},
        {"dtype": "float32"},
        {"auto_map": {"AutoModel": "m.M"}},
        {"_attn_implementation": "a/b"},
        {"sliding_window": 3},
        {"unheard_of": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_is_not_the_originals_is_found(settings: dict[str, Any], out: Path, source: Path) -> None:
    change_json(out / "config.json", lambda config: config.update(settings))
    assert ("changed-file", "config.json") in found(out)
    models.reseal(out)
    key = next(iter(settings))
    messages = [finding.message for finding in verify(out, source) if finding.code == "config-mismatch"]
    assert any(message.startswith(f"{key}:") for message in messages), messages


def test_a_setting_that_transformers_spells_anew_is_none(out: Path, source: Path) -> None:
    def spell(config: dict[str, Any]) -> None:
        config["torch_dtype"] = config.pop("dtype", None) or config.pop("torch_dtype")
        config["transformers_version"] = "0"
        config["tie_word_embeddings"] = config.get("tie_word_embeddings", False)

    change_json(out / "config.json", spell)
    models.reseal(out)
    assert ("config-mismatch", "config.json") in found(out, source)
    write_tensors(out / "model.safetensors", read_tensors(out / "model.safetensors"), {"format": "pt"})
    models.reseal(out)  # as a model that was saved from memory
    assert verify(out, source) == []


def test_a_key_that_readers_would_obey_is_found_in_the_quantization_config(out: Path, source: Path) -> None:
    change_json(out / "config.json", lambda c: c["quantization_config"].update(a_key_of_tomorrow=8))
    models.reseal(out)
    assert ("config-mismatch", "config.json") in found(out, source)
    change_json(out / "config.json", lambda c: c["quantization_config"].update(kv_cache_scheme={"num_bits": 8}))
    models.reseal(out)
    assert ("bad-config", "config.json") in found(out)


def test_files_beside_the_weights_are_the_originals(out: Path, source: Path) -> None:
    (out / "tokenizer.json").write_text('{"a": 2}')
    (out / "README.md").write_text("a better one")
    assert found(out) == {("changed-file", "tokenizer.json")}
    models.reseal(out)
    assert verify(out) == []
    assert found(out, source) == {("changed-file", "tokenizer.json")}


ADDED = {
    "modeling_own.py": ("unexpected-file", b"print(1)"),
    "model-00009.safetensors": ("unexpected-file", b"\2\0\0\0\0\0\0\0{}"),
    "notes.txt": ("unexpected-file", b"x"),
    "weights.BIN": ("foreign-weights", b"x"),
    "sub/a.joblib": ("foreign-weights", b"x"),
    "a.dill": ("foreign-weights", b"x"),
    "innocent.json": ("foreign-weights", pickle.dumps({"a": 1})),
    ".hidden.pkl": ("foreign-weights", b"x"),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_was_added_is_found(name: str, out: Path, source: Path) -> None:
    code, data = ADDED[name]
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_bytes(data)
    assert (code, name) in found(out)
    models.reseal(out)
    codes = {where for _, where in found(out, source)}
    assert name in codes


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_folds_whose_length_looks_like_a_pickle_are_no_finding(protocol: int, out: Path) -> None:
    path, wanted = out / "baracuda_folds.tensors", 0x80 + (protocol << 8)
    with TensorFile(path) as file:
        folds, tensors = file.metadata["folds"], {name: file.read(name) for name in file.entries}
    length = int.from_bytes(path.read_bytes()[:8], "little")
    # JSON may have blanks anywhere: so many that the length of the header has the bytes of a pickle's mark.
    write_tensors(path, tensors, {"folds": folds + " " * ((wanted - length) % 0x10000)})
    assert path.read_bytes()[:2] == bytes([0x80, protocol])
    models.reseal(out)
    assert found(out) == set()
    path.write_bytes(pickle.dumps({"a": 1}, protocol))
    models.reseal(out)
    assert ("foreign-weights", path.name) in found(out)


def test_pictures_and_words_for_people_are_harmless(out: Path, source: Path) -> None:
    for name in ("LICENSE", "card.png", ".gitattributes", "NOTICE.txt"):
        (out / name).write_bytes(b"x")
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").write_text("ref")
    (out / "README.md").unlink()
    assert verify(out) == [] and verify(out, source) == []


@pytest.mark.parametrize(
    "name", ["baracuda_report.json", "baracuda.sha256", "baracuda_folds.tensors", "tokenizer.json"]
)
def test_a_file_that_was_removed_is_found(name: str, out: Path) -> None:
    (out / name).unlink()
    assert ("missing-file", name) in found(out)


def test_a_report_and_checksums_that_were_both_removed_are_missed(out: Path) -> None:
    (out / "baracuda_report.json").unlink()
    (out / "baracuda.sha256").unlink()
    assert found(out) == {("missing-file", "baracuda_report.json"), ("missing-file", "baracuda.sha256")}


def test_what_a_report_says_about_smoothing_hides_nothing(out: Path, source: Path) -> None:
    names = list(read_tensors(source / "model.safetensors"))
    change_json(out / "baracuda_report.json", lambda content: content["smoothing"].update(changed=names))
    change_tensor(out / "model.safetensors", f"{Q}.weight", lambda weight: -weight)
    models.reseal(out)
    assert found(out, source) == {("wrong-values", f"{Q}.weight")}


CHANGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "one integer": (f"{Q}.weight", lambda w: w.index_put((torch.tensor(3), torch.tensor(5)), w[3, 5] ^ 1)),
    "one bit of a scale": (f"{Q}.weight_scale", lambda s: (s.view(torch.int32) ^ 1).view(torch.float32)),
    "a gain of a norm": ("model.layers.0.input_layernorm.weight", lambda w: w * 1.01),
    "a bias": ("model.layers.0.self_attn.v_proj.bias", lambda b: b * 1.01),
    "an embedding": ("model.embed_tokens.weight", lambda w: w * 1.01),
}


@pytest.mark.parametrize("name", CHANGES)
def test_smoothed_tensors_are_compared_too(name: str, out: Path, source: Path) -> None:
    tensor, change = CHANGES[name]
    change_tensor(out / "model.safetensors", tensor, change)
    models.reseal(out)
    assert found(out, source) == {("wrong-values", tensor.replace("_scale", ""))}


def test_factors_that_are_not_those_of_the_weights_are_found(out: Path, source: Path) -> None:
    path = out / "baracuda_folds.tensors"
    from baracuda.flow.checkpoint.tensorfile import TensorFile

    with TensorFile(path) as file:
        metadata = file.metadata
    tensors = read_tensors(path)
    write_tensors(path, tensors | {"0.strength": tensors["0.strength"] * 1.5}, metadata)
    models.reseal(out)
    assert {code for code, _ in found(out, source)} == {"wrong-values"}
    write_tensors(path, tensors | {"0.strength": -tensors["0.strength"]}, metadata)
    models.reseal(out)
    assert "bad-folds" in {code for code, _ in found(out, source)}
    path.unlink()
    models.reseal(out)
    assert {code for code, _ in found(out, source)} == {"wrong-values"}


@pytest.mark.parametrize(
    "leftover",
    [
        f"{Q}.weight_fake_quantize.scale",
        f"{Q}.weight_fake_quant.observer.min_val",
        f"{Q}.activation_post_process.max_val",
        f"{Q}.input_observer.min_val",
    ],
)
def test_what_training_left_over_is_found_without_the_original(leftover: str, out: Path) -> None:
    path = out / "model.safetensors"
    write_tensors(path, read_tensors(path) | {leftover: torch.ones(1)}, {"format": "pt"})
    models.reseal(out)
    assert ("extra-tensor", leftover) in found(out)


def test_a_page_that_is_drawn_again_keeps_the_checksums_true(out: Path) -> None:
    change_json(out / "baracuda_report.json", lambda content: content["model"].update(name="another"))
    report(out)
    assert found(out) == {("changed-file", "baracuda_report.json")}


@pytest.mark.parametrize("text", ["", "x", "a" * 64 + "  x", "\n", ("0" * 64 + "  config.json\n") * 2, "\0" * 70])
def test_checksums_that_cannot_be_read_are_a_finding(text: str, out: Path) -> None:
    (out / "baracuda.sha256").write_text(text)
    assert {code for code, _ in found(out)} & {"bad-manifest", "changed-file"}
