"""baracuda verify names what is wrong: each planted corruption by its code, and never a crash or a hang."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import CheckpointError, FlowError, load, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
Corrupt = Callable[[Path], None]
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify") / "model"
    models.save("llama", directory, torch.bfloat16, shard="100KB")
    return directory


@pytest.fixture(scope="module")
def good(source: Path) -> Path:
    """Static, so that every kind of tensor is there."""
    tokens = models.tokens(source.parent / "tokens.safetensors")
    quantize_checkpoint(source, source.parent / "good", activations="static", calibration=tokens)
    return source.parent / "good"


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bad"))


def codes(out: Path, against: Path | None = None) -> set[str]:
    """What is found where the checksums do not tell already that something was changed."""
    if not (out / "baracuda.sha256").is_symlink() and out.exists():
        models.reseal(out)
    return {finding.code for finding in verify(out, against)}


def holder(out: Path, tensor: str) -> Path:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    return out / index["weight_map"][tensor]


def retensor(tensor: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Corrupt:
    """Rewrite one tensor, its file otherwise sound; None leaves it out."""

    def corrupt(out: Path) -> None:
        path = holder(out, tensor)
        tensors = read_tensors(path)
        changed = change(tensors.pop(tensor))
        write_tensors(path, tensors | ({} if changed is None else {tensor: changed}), {"format": "pt"})

    return corrupt


def rejson(name: str, change: Callable[[dict[str, Any]], None]) -> Corrupt:
    def corrupt(out: Path) -> None:
        content = json.loads((out / name).read_text())
        change(content)
        (out / name).write_text(json.dumps(content))

    return corrupt


def reheader(change: Callable[[dict[str, Any]], None]) -> Corrupt:
    """Change the header of one shard and leave its data as it is."""

    def corrupt(out: Path) -> None:
        path = holder(out, f"{Q}.weight")
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return corrupt


def rewrite(change: Callable[[bytes], bytes]) -> Corrupt:
    def corrupt(out: Path) -> None:
        path = holder(out, f"{Q}.weight")
        path.write_bytes(change(path.read_bytes()))

    return corrupt


def remap(tensor: str, to: str) -> Corrupt:
    return rejson("model.safetensors.index.json", lambda index: index["weight_map"].update({tensor: to}))


def extra_tensor(out: Path) -> None:
    path = holder(out, f"{Q}.weight")
    write_tensors(path, read_tensors(path) | {"backdoor.weight": torch.ones(2, 2)}, {"format": "pt"})


def leave_by_link(out: Path) -> None:
    path = holder(out, f"{Q}.weight")
    path.rename(out.parent / "elsewhere.safetensors")
    path.symlink_to(out.parent / "elsewhere.safetensors")


def pipe(out: Path) -> None:
    path = holder(out, f"{Q}.weight")
    path.unlink()
    os.mkfifo(path)


def set_value(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
QUANT = "quantization_config"
CORRUPTIONS: dict[str, tuple[str, Corrupt]] = {
    "a truncated file": ("truncated", rewrite(lambda data: data[:-100])),
    "a file cut inside its header": ("truncated", rewrite(lambda data: data[:50])),
    "an empty file": ("truncated", rewrite(lambda data: b"")),
    "bytes that belong to nothing": ("bad-offsets", rewrite(lambda data: data + b"\0" * 64)),
    "a header longer than any": ("header-too-long", rewrite(lambda data: b"\xff" * 8 + data[8:])),
    "a header that is not JSON": ("bad-json", rewrite(lambda data: data[:8] + b"]" + data[9:])),
    "a header nested without end": (
        "bad-json",
        rewrite(lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000),
    ),
    "a shape larger than its data": ("bad-shape", reheader(lambda h: h[f"{Q}.weight"].update(shape=[2**40, 2**20]))),
    "a shape that overflows": ("bad-shape", reheader(lambda h: h[f"{Q}.weight"].update(shape=[2**62, 2**62, 0]))),
    "a negative size": ("bad-shape", reheader(lambda h: h[f"{Q}.weight"].update(shape=[-64, -64]))),
    "overlapping tensors": (
        "bad-offsets",
        reheader(lambda h: h[f"{Q}.weight_scale"].update(data_offsets=[16, 272])),
    ),
    "an unknown element type": ("bad-dtype", reheader(lambda h: h[f"{Q}.weight"].update(dtype="I3"))),
    "a path out of the directory": ("path-escape", remap(f"{Q}.weight", "../../etc/passwd.safetensors")),
    "an absolute path": ("path-escape", remap(f"{Q}.weight", "/etc/passwd.safetensors")),
    "a link out of the directory": ("path-escape", leave_by_link),
    "a pickle in the index": ("not-safetensors", remap(f"{Q}.weight", "pytorch_model.bin")),
    "a pickle beside the shards": ("foreign-weights", lambda out: (out / "pytorch_model.bin").touch()),
    "a pickle in a folder": ("foreign-weights", lambda out: ((out / "a").mkdir(), (out / "a" / "b.bin").touch())),
    "a pipe for a file": ("unreadable", pipe),
    "a shard that is not there": ("missing-file", lambda out: holder(out, f"{Q}.weight").unlink()),
    "an index that is not JSON": ("bad-json", lambda out: (out / INDEX).write_bytes(b"\xff{")),
    "an index of something else": ("bad-index", rejson(INDEX, lambda index: index.update(weight_map=[1, 2]))),
    "a wrong total": ("bad-index", rejson(INDEX, lambda index: index["metadata"].update(total_size=5))),
    "a scale of NaN": ("bad-scale", retensor(f"{Q}.weight_scale", set_value((3, 0), float("nan")))),
    "a scale of zero": ("bad-scale", retensor(f"{Q}.weight_scale", set_value((3, 0), 0.0))),
    "a negative scale": ("bad-scale", retensor(f"{Q}.input_scale", set_value((0,), -1.0))),
    "an infinite norm": ("not-finite", retensor("model.norm.weight", set_value((5,), float("inf")))),
    "a float weight where int8 belongs": ("wrong-dtype", retensor(f"{Q}.weight", lambda w: w.float())),
    "a missing scale": ("missing-tensor", retensor(f"{Q}.weight_scale", lambda w: None)),
    "a missing weight": ("missing-tensor", retensor(f"{Q}.weight", lambda w: None)),
    "a tensor too many": ("extra-tensor", extra_tensor),
    "a transposed scale": ("shape-mismatch", retensor(f"{Q}.weight_scale", lambda w: w.T.contiguous())),
    "a weight of another model": ("shape-mismatch", rejson(CONFIG, lambda c: c.update(hidden_size=128))),
    "input scales that differ in a fused layer": (
        "fused-scales-differ",
        retensor("model.layers.0.self_attn.k_proj.input_scale", lambda s: s * 2),
    ),
    "an ignored layer that is quantized": ("config-mismatch", rejson(CONFIG, lambda c: c[QUANT]["ignore"].append(Q))),
    "a head that the config calls quantized": (
        "config-mismatch",
        rejson(CONFIG, lambda c: c[QUANT].update(ignore=[])),
    ),
    "a dynamic config over static tensors": (
        "extra-tensor",
        rejson(
            CONFIG,
            lambda c: c[QUANT]["config_groups"]["group_0"]["input_activations"].update(dynamic=True, strategy="token"),
        ),
    ),
    "an ignore list that is none": ("bad-config", rejson(CONFIG, lambda c: c[QUANT].update(ignore=None))),
    "an ignore pattern that is none": ("bad-config", rejson(CONFIG, lambda c: c[QUANT]["ignore"].append("re:("))),
    "an ignore pattern of any size": (
        "bad-config",
        rejson(CONFIG, lambda c: c[QUANT].update(ignore=["re:a{9999999999}"])),
    ),
    "a scheme nobody reads": (
        "bad-config",
        rejson(CONFIG, lambda c: c[QUANT]["config_groups"]["group_0"]["weights"].update(num_bits=[8])),
    ),
    "a config without quantization": ("not-quantized", rejson(CONFIG, lambda c: c.pop(QUANT))),
    "a config that is not JSON": ("bad-json", lambda out: (out / CONFIG).write_text("{,}")),
    "no config": ("missing-file", lambda out: (out / CONFIG).unlink()),
    "a config no model fits": ("bad-config", rejson(CONFIG, lambda c: c.update(num_attention_heads="many"))),
    "a config of a billion layers": ("bad-config", rejson(CONFIG, lambda c: c.update(num_hidden_layers=10**9))),
    "a config of a billion experts": ("bad-config", rejson(CONFIG, lambda c: c.update(num_local_experts=10**9))),
    "a config of a billion blocks": ("bad-config", rejson(CONFIG, lambda c: c.update(depths=[2, 10**9]))),
    "a model beside the shards of another": (
        "bad-index",
        lambda out: shutil.copy(holder(out, f"{Q}.weight"), out / SINGLE),
    ),
    "an unfinished run": ("unfinished", lambda out: (out / ".baracuda").mkdir()),
}


def test_a_sound_checkpoint_has_no_findings(good: Path, source: Path) -> None:
    assert verify(good, source) == []


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_verify_names(name: str, bad: Path) -> None:
    expected, corrupt = CORRUPTIONS[name]
    corrupt(bad)
    found = verify(bad)
    assert expected in {finding.code for finding in found}, found


@pytest.mark.parametrize("ignore", [None, "lm_head", ["re:("]])
def test_load_names_a_bad_ignore_list_too(ignore: Any, bad: Path) -> None:
    rejson(CONFIG, lambda c: c[QUANT].update(ignore=ignore))(bad)
    with pytest.raises(FlowError, match=r"quantization_config: (its )?ignore"):
        load(bad)


def test_values_that_are_not_the_originals_are_found_with_against(bad: Path, source: Path) -> None:
    retensor(f"{Q}.weight", lambda w: -w)(bad)
    retensor("model.embed_tokens.weight", set_value((0, 0), 1.5))(bad)
    assert {finding.code for finding in verify(bad)} == {"changed-file"}
    assert codes(bad) == set()
    found = {finding.where: finding.code for finding in verify(bad, source)}
    assert found == {f"{Q}.weight": "wrong-values", "model.embed_tokens.weight": "wrong-values"}


def test_every_row_is_compared_with_the_originals(bad: Path, source: Path) -> None:
    retensor(f"{Q}.weight", lambda w: w.index_add(0, torch.tensor([11]), torch.ones_like(w[:1])))(bad)
    models.reseal(bad)
    assert {finding.where: finding.code for finding in verify(bad, source)} == {f"{Q}.weight": "wrong-values"}


DOWN = "model.layers.0.mlp.down_proj.weight"
OUTLIERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one outlier": lambda w: w.index_put((torch.arange(8), torch.tensor(7)), torch.tensor(35.0)),
    "a row of one value": lambda w: w.index_fill(0, torch.tensor([0]), 0.0).index_put(
        (torch.tensor(0), torch.tensor(3)), torch.tensor(1e-3)
    ),
    "rows of zeros": lambda w: w.index_fill(0, torch.arange(8), 0.0),
    "rows too small for a scale": lambda w: w * 1e-38,
    "rows of f16's smallest numbers": lambda w: w * 2.5e-7,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
@pytest.mark.parametrize("kind", OUTLIERS)
def test_outliers_are_no_damage(kind: str, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """However little of its row's range a weight takes up, rounding is all that happened to it."""
    source = models.plain_checkpoint(tmp_path / "model", shards=1, layers=1, dtype=dtype)
    (path,) = source.glob("*.safetensors")
    weight = OUTLIERS[kind](torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))).to(dtype)
    write_tensors(path, read_tensors(path) | {DOWN: weight}, {"format": "pt"})
    quantize_checkpoint(source, tmp_path / "out", scheme=scheme, **({"group_size": 32} if scheme == "w4a16" else {}))
    assert verify(tmp_path / "out", source) == []


SCALES: dict[str, tuple[set[str], Callable[[torch.Tensor], torch.Tensor]]] = {
    "of bf16": (set(), lambda s: s.to(torch.bfloat16)),
    "of f64": (set(), lambda s: s.double()),
    "of other rows": ({"wrong-values"}, lambda s: s.roll(1, 0)),
    "a little too large": ({"wrong-values"}, lambda s: s * 1.02),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_may_be_rounded_to_their_type_and_nothing_else(name: str, bad: Path, source: Path) -> None:
    expected, change = SCALES[name]
    retensor(f"{Q}.weight_scale", change)(bad)
    rejson(INDEX, lambda index: index.pop("metadata"))(bad)  # another type has another size
    assert "wrong-values" in codes(bad, source)  # this version would have written other bits
    rejson("baracuda_report.json", lambda report: report.update(baracuda="0.0.1"))(bad)
    assert codes(bad, source) == expected


def test_a_scale_that_swallows_its_row_is_found(bad: Path, source: Path) -> None:
    retensor(f"{Q}.weight", torch.zeros_like)(bad)
    retensor(f"{Q}.weight_scale", lambda s: s * 1000)(bad)
    assert codes(bad, source) == {"wrong-values"}


def test_what_is_not_finite_in_the_original_either_is_found_without_it_only(source: Path, tmp_path: Path) -> None:
    """A mask of infinities, for one."""
    original = Path(shutil.copytree(source, tmp_path / "original"))
    retensor("model.norm.weight", set_value((5,), float("-inf")))(original)
    quantize_checkpoint(original, tmp_path / "out")
    assert {(found.code, found.where) for found in verify(tmp_path / "out")} == {("not-finite", "model.norm.weight")}
    assert verify(tmp_path / "out", original) == []
    assert codes(tmp_path / "out", source) == {"not-finite", "wrong-values"}


@pytest.mark.parametrize("inside", [True, False])
def test_links_lead_nowhere_but_to_the_blobs_of_the_same_repository_of_the_cache(
    inside: bool, good: Path, source: Path, tmp_path: Path
) -> None:
    """As the Hugging Face Hub lays out what it has downloaded."""
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abcd"
    blobs = repository / "blobs" if inside else tmp_path / "models--another--model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True)
    for path in good.iterdir():
        shutil.copy(path, blobs / f"{path.name}-digest")
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / f"{path.name}-digest", snapshot))
    if inside:
        load(snapshot)
    else:
        with pytest.raises(CheckpointError, match="leads out"):
            load(snapshot)
    assert codes(snapshot, source) == set() if inside else "path-escape" in codes(snapshot)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_model_beside_the_index_of_another_is_refused(indexed: bool, source: Path, tmp_path: Path) -> None:
    """transformers reads the one, servers the other; a file that the index names is no other."""
    original = Path(shutil.copytree(source, tmp_path / "original"))
    shards = sorted(original.glob("*.safetensors"))
    whole = {name: tensor for path in shards for name, tensor in read_tensors(path).items()}
    write_tensors(original / SINGLE, whole, {"format": "pt"})
    if indexed:
        rejson(INDEX, lambda index: index.update(weight_map=dict.fromkeys(whole, SINGLE)))(original)
        quantize_checkpoint(original, tmp_path / "out")
        assert verify(tmp_path / "out", original) == []
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors or .*\.index\.json, got both: .* move one"):
            quantize_checkpoint(original, tmp_path / "out")


def test_a_file_that_did_not_come_along_is_found_with_against(bad: Path, source: Path, tmp_path: Path) -> None:
    original = Path(shutil.copytree(source, tmp_path / "original"))
    for name in ("2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "README.md", "earlier/baracuda_report.json"):
        (original / name).parent.mkdir(exist_ok=True)
        (original / name).touch()
    (original / "earlier" / "vocab.txt").touch()
    (bad / "generation_config.json").unlink()
    found = {(finding.code, finding.where) for finding in verify(bad, original)}
    assert found == {("missing-file", "2_Dense/model.safetensors"), ("missing-file", "generation_config.json")}


def test_a_wrong_original_is_a_finding_too(good: Path, tmp_path: Path) -> None:
    assert codes(good, tmp_path / "nothing") == {"unreadable"}
    assert codes(tmp_path / "nothing") == {"missing-file"}


def test_random_damage_never_crashes_it(good: Path, tmp_path: Path) -> None:
    """Bytes flipped in headers, index and config: findings or none, but always an answer."""
    chance = random.Random(1)
    files = [path.name for path in sorted(good.iterdir()) if path.suffix in (".json", ".safetensors")]
    for number in range(60):
        out = Path(shutil.copytree(good, tmp_path / f"{number}"))
        path = out / chance.choice(files)
        data = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(min(len(data), 2000))] = chance.randrange(256)
        path.write_bytes(data)
        verify(out)
        shutil.rmtree(out)
