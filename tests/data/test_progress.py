import subprocess
import sys

import pytest

from jax_titan.data.progress import READING, SCANNING, TOKENIZING, rich_progress


def test_a_log_gets_nothing_of_what_is_quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with rich_progress() as progress:
        progress(5, 1234, SCANNING)
        progress(1234, 1234, TOKENIZING)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_a_log_gets_one_plain_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("jax_titan.data.progress.PATIENCE_SECONDS", -1.0)
    with rich_progress() as progress:
        progress(5, 1234, READING)
        assert capsys.readouterr().err == ""
        for done in range(0, 1234, 100):
            progress(done, 1234, SCANNING)
            progress(done, 1234, TOKENIZING)
    captured = capsys.readouterr()
    assert captured.err == f"preparing the corpus, once: {SCANNING}\n"
    assert captured.out == ""


def test_a_terminal_gets_a_bar_for_each_stage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with rich_progress() as progress:
        progress(10, 10, SCANNING)
        progress(10, 10, TOKENIZING)
    captured = capsys.readouterr()
    assert SCANNING in captured.err
    assert TOKENIZING in captured.err
    assert captured.out == ""


def test_preparing_text_imports_neither_jax_nor_grain():
    script = (
        "import sys; from jax_titan.data import store, text, progress\n"
        "assert not {'jax', 'grain', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
