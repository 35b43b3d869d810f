"""What the documents show is what the program does: the commands are accepted, the errors are the real ones."""

import re
import shlex
from pathlib import Path

import pytest

from jax_titan.cli import main
from jax_titan.config import FIELDS, load
from jax_titan.mpmd.schedule import SCHEDULES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [
    command
    for document in DOCUMENTS
    for command in re.findall(r"^jax-titan (train .*)$", document.read_text(), re.MULTILINE)
]
SHOWN = re.findall(r"^\$ jax-titan (.*)\n((?:.+\n)+?)```", README, re.MULTILINE)


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-book.txt").write_text("Once upon a time.\n" * 20)
    Path("corpus.jsonl").write_text('{"text": "Once upon a time.", "question": "How?", "answer": "So."}\n' * 20)
    Path("runs/book/checkpoints").mkdir(parents=True)
    for name in ("tokenizer.model", "tokenizer.json"):
        Path(name).touch()


def test_the_readme_has_commands_and_shown_output():
    assert len(COMMANDS) >= 8
    assert len(SHOWN) >= 1


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_for_training_are_accepted(command):
    _, source, *flags = shlex.split(command)
    settings = [flag for flag in flags if flag not in ("--dry-run", "--json")]
    assert load(source, settings).run.dir
    if settings != flags:
        assert main(["train", source, *flags]) == 0


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_shown_errors_are_the_real_ones(command, output, capsys):
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err == output


def test_make_targets_named_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for document in ("README.md", "CONTRIBUTING.md"):
        named |= set(re.findall(r"(?:^|`)make\s+([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_links_between_the_documents_lead_somewhere():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_configuration_offers_exactly_the_schedules_there_are():
    assert set(FIELDS["pipeline.schedule"].choices or ()) == set(SCHEDULES)
