import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_titan.data.cache import building, discard


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def make_old(directory: Path, seconds: float = 3600) -> None:
    then = time.time() - seconds
    os.utime(directory, (then, then))


def killed_build(place: Path) -> Path:
    """What a build leaves that was killed."""
    script = (
        "import os, pathlib, signal, sys\n"
        "from jax_titan.data.cache import building\n"
        "with building(pathlib.Path(sys.argv[1])) as d:\n"
        "    (d / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(place)]).returncode == -signal.SIGKILL
    (left,) = place.parent.glob(".building-*")
    return left


def test_a_directory_appears_when_it_is_whole(tmp_path: Path):
    place = tmp_path / "new" / "d"
    with building(place) as directory:
        (directory / "f").write_text("x")
        assert not place.exists()
    assert names(place) == ["f"]
    assert names(place.parent) == ["d"]


def fail_to_build(place: Path) -> None:
    with building(place) as directory:
        (directory / "f").write_text("x")
        raise RuntimeError("half way")


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    with pytest.raises(RuntimeError, match="half way"):
        fail_to_build(tmp_path / "d")
    assert names(tmp_path) == []


def test_of_two_builds_the_first_to_end_stays(tmp_path: Path):
    with building(tmp_path / "d") as slow:
        (slow / "f").write_text("slow")
        with building(tmp_path / "d") as fast:
            (fast / "f").write_text("fast")
    assert (tmp_path / "d" / "f").read_text() == "fast"
    assert names(tmp_path) == ["d"]


def test_a_killed_build_is_removed_by_a_later_one_when_it_is_old(tmp_path: Path):
    left = killed_build(tmp_path / "d")
    with building(tmp_path / "e"):
        assert left.exists()  # young: it may be about to lock
    make_old(left)
    with building(tmp_path / "f"):
        assert not left.exists()
    assert names(tmp_path) == ["e", "f"]


def test_a_build_that_lives_is_not_removed_however_old(tmp_path: Path):
    with building(tmp_path / "d") as slow:
        make_old(slow, seconds=30 * 24 * 3600)
        with building(tmp_path / "e"):
            assert slow.exists()
    assert names(tmp_path) == ["d", "e"]


def test_discarding_removes_all_or_finds_nothing(tmp_path: Path):
    with building(tmp_path / "d") as directory:
        (directory / "f").write_text("x")
    discard(tmp_path / "d")
    discard(tmp_path / "d")
    assert names(tmp_path) == []
