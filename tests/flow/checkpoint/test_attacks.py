"""Checkpoints made to crash, to hang, to take all memory, or to pass for another: each is refused, or found."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from typer.testing import CliRunner

from baracuda import BaracudaError
from baracuda.flow import (
    FlowError,
    compare_reports,
    evaluate_checkpoint,
    inspect_checkpoint,
    load,
    quantize_checkpoint,
    report,
    verify,
)
from baracuda.flow.checkpoint.folds import FoldRecord, read_folds, write_folds
from baracuda.flow.checkpoint.tensorfile import TensorFile, read_tensors, write_tensors
from baracuda_cli import app

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
Q, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm.weight"
ENDLESS = "re:(.*)*(.*)*(.*)*(.*)*!$"
SCHEMES: dict[str, dict[str, Any]] = {
    "w8a8": {},
    "smooth": {"smooth": True},
    "w4a16": {"scheme": "w4a16", "group_size": 32},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacks")
    models.save("llama", folder / "model", torch.bfloat16)
    tokens = models.tokens(folder / "tokens.safetensors")
    for name, options in SCHEMES.items():
        data = {"calibration": tokens} if name == "smooth" else {}
        quantize_checkpoint(folder / "model", folder / name, **options, **data)
    return folder


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(kept / name, tmp_path / name))


def found(out: Path, against: Path | None = None) -> set[tuple[str, str]]:
    return {(finding.code, finding.where) for finding in verify(out, against)}


def change_config(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((out / "config.json").read_text())
    change(content)
    (out / "config.json").write_text(json.dumps(content))
    if (out / "baracuda.sha256").exists():
        models.reseal(out)


def change_tensors(out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = out / "model.safetensors"
    with TensorFile(path) as file:
        metadata = file.metadata
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors, metadata)
    if (out / "baracuda.sha256").exists():
        models.reseal(out)


@contextmanager
def little_memory() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# -- configs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -8, -1024, True, 32.0, "32", 2**40])
def test_groups_of_no_columns_are_refused(size: Any, copied: Callable[[str], Path]) -> None:
    out = copied("w4a16")
    change_config(
        out, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=size)
    )
    assert ("bad-config", "config.json") in found(out)
    with pytest.raises(FlowError, match=r"in groups of .* are not read here"):
        load(out)


@pytest.mark.parametrize("where", ["ignore", "targets"])
def test_a_regular_expression_that_never_ends_is_refused(where: str, kept: Path, copied: Callable[[str], Path]) -> None:
    out = copied("w8a8")

    def change(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        if where == "ignore":
            quantization["ignore"] = [ENDLESS]
        else:
            quantization["config_groups"]["group_1"] = quantization["config_groups"]["group_0"] | {"targets": [ENDLESS]}

    change_config(out, change)
    assert ("bad-config", "config.json") in found(out)
    assert "may take forever" in inspect_checkpoint(out)["note"]
    for call in (lambda: load(out), lambda: evaluate_checkpoint(out, kept / "tokens.safetensors")):
        with pytest.raises(FlowError, match="may take forever"):
            call()


def test_repetitions_beside_each_other_are_refused_by_the_length_of_the_names(copied: Callable[[str], Path]) -> None:
    out = copied("w8a8")
    change_config(out, lambda c: c["quantization_config"].update(ignore=["re:.*a.*a.*a.*a.*a.*!"]))
    change_tensors(out, lambda t: t.update({f"{'a' * 490}.{i}.weight": torch.ones(1) for i in range(9)}))
    assert any("may take forever" in finding.message for finding in verify(out))
    with pytest.raises(FlowError, match="may take forever"):
        load(out)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(architectures=[1]),
        lambda c: c.update(architectures="x", model_type=[1]),
        lambda c: c.update(model_type={"a": 1}),
        lambda c: c["quantization_config"].update(ignore=[1, None]),
        lambda c: c["quantization_config"].update(ignore=7),
        lambda c: c["quantization_config"].update(quant_method="[/x]"),
        lambda c: c["quantization_config"].update(quant_method=[1], format="[red]"),
        lambda c: c.update(quantization_config=[1]),
    ],
)
def test_inspect_draws_or_refuses_every_config(change: Callable[[Any], Any], copied: Callable[[str], Path]) -> None:
    out = copied("w8a8")
    change_config(out, change)
    for options in ([], ["--json"], ["--layers"]):
        done = CliRunner().invoke(app, ["inspect", str(out), *options])
        assert done.exit_code in (0, 2) and (done.exception is None or isinstance(done.exception, SystemExit))


# -- tensors -----------------------------------------------------------------------------------------------------


def test_groups_far_out_of_range_take_no_memory(copied: Callable[[str], Path]) -> None:
    out = copied("w4a16")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            indices = torch.full((tensors[name].shape[1] * 8,), 2**31 - 1, dtype=torch.int32)
            tensors[name.replace("weight_packed", "weight_g_idx")] = indices

    change_tensors(out, change)
    change_config(
        out, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(actorder="group")
    )
    with little_memory():
        assert ("bad-groups", f"{Q}.weight_g_idx") in found(out)
        with pytest.raises(FlowError, match="got a group 2147483647"):
            load(out)


@pytest.mark.parametrize("length", [300, 600])
def test_a_broken_linear_of_a_long_name_is_found(length: int, kept: Path, copied: Callable[[str], Path]) -> None:
    out, source, name = copied("w8a8"), copied("model"), "m" * length
    change_tensors(source, lambda t: t.update({f"{name}.weight": torch.ones(8, 8, dtype=torch.bfloat16)}))
    change_tensors(out, lambda t: t.update({f"{name}.weight": torch.ones(8, 8, dtype=torch.int8)}))
    codes = {code for code, _ in found(out, source)}
    assert codes >= ({"missing-tensor"} if length < 512 else {"bad-header"})


def test_a_finding_that_is_forgiven_hides_no_other(kept: Path, copied: Callable[[str], Path]) -> None:
    """A bias of infinities is the original's; the weight beside it is not."""
    out, source = copied("w8a8"), copied("model")
    infinite = {f"{Q}.z": torch.full((3,), float("inf"))}
    change_tensors(source, lambda t: t.update(infinite))
    change_tensors(out, lambda t: t.update({**infinite, f"{Q}.weight": -t[f"{Q}.weight"]}))
    assert ("wrong-values", f"{Q}.weight") in found(out, source)


def test_scales_of_w4a8_that_no_kernel_takes_are_found_without_the_original(copied: Callable[[str], Path]) -> None:
    out, name = copied("w4a8"), f"{Q}.weight_scale"
    assert verify(out) == []
    change_tensors(out, lambda t: t[name].mul_(torch.linspace(1, 1.4, t[name].numel()).view_as(t[name])))
    assert found(out) == {("bad-scale", name)}
    with pytest.raises(FlowError, match="1 to 15 times a scale of their row"):
        load(out)


# -- folds -------------------------------------------------------------------------------------------------------


def resmooth(out: Path, records: list[FoldRecord], change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    write_folds(out / "baracuda_folds.tensors", records)
    change_tensors(out, change)


def halved(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensors[name] / 2})


def test_a_fold_that_nobody_absorbs_is_found(kept: Path, copied: Callable[[str], Path]) -> None:
    twos = torch.full((64,), 2.0)
    out = copied("w8a8")
    resmooth(out, [FoldRecord(NORM, None, True, 0.0, twos, {})], halved(NORM))
    assert found(out, kept / "model") == {("bad-folds", NORM)}
    embedding = "model.embed_tokens.weight"
    resmooth(out, [FoldRecord(embedding, None, False, 0.0, torch.full((160,), 2.0), {})], halved(embedding))
    assert ("bad-folds", embedding) in found(out, kept / "model")


def test_a_fold_with_one_reader_left_out_is_found(kept: Path, copied: Callable[[str], Path]) -> None:
    out = copied("smooth")
    first, *others = read_folds(out / "baracuda_folds.tensors")
    assert verify(out, kept / "model") == [] and len(first.into) == 3
    fewer = {name: channels for name, channels in first.into.items() if not name.endswith("v_proj.weight")}
    record = FoldRecord(first.divided, first.bias, first.norm, first.offset, first.strength, fewer)
    resmooth(out, [record, *others], lambda tensors: None)
    assert ("bad-folds", first.divided) in found(out, kept / "model")
    offset = FoldRecord(first.divided, first.bias, first.norm, 1.0, first.strength, first.into)
    resmooth(out, [offset, *others], lambda tensors: None)
    assert ("bad-folds", first.divided) in found(out, kept / "model")


def test_folds_of_a_model_that_cannot_be_run_are_not_believed(kept: Path, copied: Callable[[str], Path]) -> None:
    out, source = copied("smooth"), copied("model")
    for directory in (source, out):
        change_config(directory, lambda config: config.update(model_type="nobody-knows"))
    codes = {code for code, _ in found(out, source)}
    assert codes == {"bad-folds"}


@pytest.mark.parametrize("name", ["gemma", "mixtral", "opt", "bert"])
def test_honest_folds_are_proved(name: str, tmp_path: Path) -> None:
    """Zeros in place of weights show what reads what; where they do not, the original itself does."""
    models.save(name, tmp_path / "model", torch.bfloat16)
    tokens = models.tokens(tmp_path / "tokens.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", smooth=True, calibration=tokens, allow_float=True)
    assert read_folds(tmp_path / "out" / "baracuda_folds.tensors")
    assert verify(tmp_path / "out", tmp_path / "model") == []


def test_what_is_compared_less_closely_is_told(kept: Path, copied: Callable[[str], Path]) -> None:
    notes: list[str] = []
    assert verify(kept / "w8a8", kept / "model", on_note=notes.append) == [] and notes == []
    out = copied("w8a8")
    content = json.loads((out / "baracuda_report.json").read_text())
    (out / "baracuda_report.json").write_text(json.dumps(content | {"method": "gptq"}))
    models.reseal(out)
    assert verify(out, kept / "model", on_note=notes.append) == []
    assert notes == ["14 Linears only resemble the original: the method that chose their integers is not run again"]
    done = CliRunner().invoke(app, ["verify", str(out), "--against", str(kept / "model")])
    assert "Note: 14 Linears only resemble" in " ".join(done.output.split())


# -- files -------------------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["innocent.json", "README.md"])
def test_pickles_of_every_protocol_are_found_under_any_name(
    protocol: int, name: str, copied: Callable[[str], Path]
) -> None:
    out = copied("w8a8")
    (out / name).write_bytes(pickle.dumps(Runs(), protocol=protocol))
    models.reseal(out)
    assert found(out) == {("foreign-weights", name)}


@pytest.mark.parametrize(
    "text", ["cats are\nnot pickles\n.", "# Read me\n", "I am a text.", "(a) one", "a.", "{}", "c\nd\n.", "", "]."]
)
def test_texts_are_no_pickles(text: str, copied: Callable[[str], Path]) -> None:
    out = copied("w8a8")
    (out / "README.md").write_text(text)
    assert verify(out) == []


@pytest.mark.parametrize("name", [".baracuda_report.html.tmp", ".baracuda.sha256.tmp", "baracuda_report.html"])
def test_a_report_is_never_written_through_a_link(name: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    out, precious = copied("w8a8"), tmp_path / "precious"
    precious.write_text("precious")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(precious)
    report(out)
    assert precious.read_text() == "precious"
    assert (out / "baracuda_report.html").is_file() and not (out / "baracuda_report.html").is_symlink()


@pytest.mark.parametrize("link", [".baracuda", ".baracuda/lock", ".baracuda/run.json", "sub"])
@pytest.mark.parametrize("resume", [False, True])
def test_nothing_is_written_or_removed_through_a_link_in_the_output(
    link: str, resume: bool, kept: Path, tmp_path: Path
) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    for name in ("a.tmp", "b", "run.json"):
        (home / name).write_text("{}")
    (out / link).parent.mkdir(parents=True, exist_ok=True)
    (out / ".baracuda").mkdir(exist_ok=True) if link == "sub" else None
    (out / link).symlink_to(home if link in (".baracuda", "sub") else home / "b")
    with pytest.raises(FlowError, match="is a link: remove it, or choose another output directory"):
        quantize_checkpoint(kept / "model", out, resume=resume)
    assert {path.name: path.read_text() for path in home.iterdir()} == dict.fromkeys(("a.tmp", "b", "run.json"), "{}")


@pytest.mark.parametrize("line", ["../../etc/passwd", "/etc/passwd", "./config.json", ".git/x", "a\x1b[2J"])
def test_checksums_of_files_elsewhere_are_missing_files(line: str, copied: Callable[[str], Path]) -> None:
    out = copied("w8a8")
    path = out / "baracuda.sha256"
    path.write_text(path.read_text() + f"{'0' * 64}  {line}\n")
    assert found(out) == {("missing-file", line)}


# -- names, reports and recipes ----------------------------------------------------------------------------------

NUMBERS = ["a.\u00b2", "9" * 500, "a.\u0663.b"]


@pytest.mark.parametrize("name", NUMBERS)
def test_layers_whose_numbers_are_none_are_quantized_and_compared(
    name: str, kept: Path, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied("model")
    change_tensors(source, lambda t: t.update({f"{name}.weight": torch.ones(32, 32, dtype=torch.bfloat16)}))
    change_config(source, lambda config: config.update(model_type="nobody-knows"))
    content = quantize_checkpoint(source, tmp_path / "out")
    assert name in {layer["name"] for layer in content["layers"]}
    assert verify(tmp_path / "out", source) == []
    rows, page = compare_reports([tmp_path / "out", kept / "w8a8"])
    assert len(rows) == 3 and page


@pytest.mark.parametrize("text", ["a=" + "[" * 5000, f"group_size={'9' * 5000}", "\0", "a = 'b", "[layers]\nmatch=3"])
def test_a_recipe_that_is_none_is_told_in_a_sentence(text: str, kept: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(FlowError, match=r"recipe\.toml: .*expected"):
        quantize_checkpoint(kept / "model", tmp_path / "out", recipe=recipe)
    with pytest.raises(BaracudaError, match="expected a recipe in TOML"):
        quantize_checkpoint(kept / "model", tmp_path / "out", recipe=tmp_path)
