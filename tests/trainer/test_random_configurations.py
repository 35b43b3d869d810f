"""Any combination of fields is either refused in one line each, exit code 2, or runs."""

import json
import math

import numpy as np
import pytest

from jax_titan.cli import main

AXES = ("data", "fsdp", "tensor")
REMATS = ("none", "full", "dots", "query,ffn_out", "key, value", "quary", "full,none", "")


def draw(seed):
    """A random configuration by field; about every second one is refused."""
    rng = np.random.default_rng(seed)

    def pick(*values, odds=None):
        return values[rng.choice(len(values), p=odds)]

    kv_heads = pick(1, 2, 4, odds=(0.2, 0.4, 0.4))
    heads = kv_heads * pick(1, 2) if rng.random() < 0.97 else pick(3, 5)
    stages = pick(1, 2, 3, 4, 9, odds=(0.1, 0.35, 0.3, 0.2, 0.05))
    microbatches = pick(1, 2, 3, 4)
    fields = {
        "model.layers": pick(1, 2, 3, 4, odds=(0.1, 0.3, 0.3, 0.3)),
        "model.heads": heads,
        "model.kv_heads": kv_heads,
        "model.dim": heads * pick(2, 4, 6) if rng.random() < 0.95 else pick(10, 14, 15),
        "model.head_dim": pick(0, 4, 3, odds=(0.75, 0.22, 0.03)),
        "model.ffn_dim": pick(8, 12, 24, 7, odds=(0.4, 0.3, 0.27, 0.03)),
        "model.vocab_size": pick(0, 258, 301, 512, 100, odds=(0.5, 0.1, 0.2, 0.18, 0.02)),
        "model.tied": pick("true", "false"),
        "model.dtype": pick("float32", "float32", "bfloat16"),
        "model.rope_factor": pick(1, 1, 8),
        "train.microbatches": microbatches,
        "train.batch": microbatches * pick(2, 4, 8, 12) if rng.random() < 0.95 else pick(5, 7),
        "train.sequence_length": pick(8, 13, 16),
        "train.remat": pick(*REMATS, odds=(0.43, 0.2, 0.1, 0.1, 0.1, 0.03, 0.02, 0.02)),
        "train.loss_chunk": pick(0, 0, 1, 5, 16, 1000),
        "train.loss_accumulator": pick("float32", "bfloat16"),
        "optimizer.state_dtype": pick("float32", "bfloat16"),
        "data.packing": pick("split", "best-fit"),
        "parallel.layout": pick("mpmd", "mpmd", "spmd"),
        "parallel.scan_layers": pick("true", "false", odds=(0.1, 0.9)),
        "pipeline.stages": stages,
        "pipeline.schedule": pick("1f1b", "gpipe"),
    }
    for axis in AXES:
        fields[f"parallel.{axis}"] = pick(1, 2, 3, 4, odds=(0.5, 0.4, 0.05, 0.05))
        if rng.random() < 0.2:
            count = stages if rng.random() < 0.9 else stages + 1
            fields[f"pipeline.{axis}"] = ",".join(str(pick(1, 2)) for _ in range(count))
        elif rng.random() < 0.02:
            fields[f"pipeline.{axis}"] = pick("two", "1,,1", "0", "-1", "1;2")
    return fields


def meshes(c):
    """The parts of each stage by axis; None when a list is none."""
    if c["parallel.layout"] == "spmd":
        return [{axis: c[f"parallel.{axis}"] for axis in AXES}]
    found = [{} for _ in range(c["pipeline.stages"])]
    for axis in AXES:
        text = c.get(f"pipeline.{axis}", "")
        sizes = text.split(",") if text else [c[f"parallel.{axis}"]] * len(found)
        if len(sizes) != len(found) or not all(str(size).isdigit() and int(size) for size in sizes):
            return None
        for mesh, size in zip(found, sizes, strict=True):
            mesh[axis] = int(size)
    return found


def works(c):
    """Whether a configuration can run, by the rules as the documentation states them."""
    dim, heads, kv_heads, head_dim = (c[f"model.{key}"] for key in ("dim", "heads", "kv_heads", "head_dim"))
    if heads % kv_heads or (head_dim == 0 and dim % heads) or (head_dim or dim // heads) % 2:
        return False
    if c["train.batch"] % c["train.microbatches"] or 0 < c["model.vocab_size"] < 258:
        return False
    if c["train.remat"] in ("quary", "full,none", ""):
        return False
    pipelined = c["parallel.layout"] == "mpmd"
    if pipelined and (c["parallel.scan_layers"] == "true" or c["pipeline.stages"] > c["model.layers"] + 2):
        return False
    stages, sequences = meshes(c), c["train.batch"] // c["train.microbatches"]
    return stages is not None and not any(
        sequences % (mesh["data"] * mesh["fsdp"])
        or dim % mesh["fsdp"]
        or kv_heads % mesh["tensor"]
        or c["model.ffn_dim"] % mesh["tensor"]
        for mesh in stages
    )


def arguments(c, directory):
    fixed = {"data.tokenizer": "bytes", "run.dir": directory / "run", "data.path": directory / "text.jsonl"}
    fixed |= {"train.steps": 1, "eval.batches": 1}
    return ["train", "llama3-debug", *(f"--{name}={value}" for name, value in {**c, **fixed}.items())]


@pytest.fixture
def directory(tmp_path):
    lines = [json.dumps({"text": f"document {i}, " * (i % 7 + 1)}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("block", range(4))
def test_a_random_configuration_is_refused_in_lines_that_name_fields_or_accepted(block, directory, capsys):
    outcomes = {0: 0, 2: 0}
    for seed in range(block * 100, block * 100 + 100):
        c = draw(seed)
        code = main([*arguments(c, directory), "--dry-run"])
        out, err = capsys.readouterr()
        outcomes[code] += 1
        assert code == (0 if works(c) else 2), (seed, err)
        if code:
            problems = err.splitlines()
            assert out == ""
            assert problems
            for problem in problems:
                assert problem.split(":")[0] in {*c, *(f"pipeline.{axis}" for axis in AXES)}, (seed, problem)
                assert len(problem) < 200, (seed, problem)
        else:
            assert err == ""
            assert "nothing was allocated or written" in out
    assert min(outcomes.values()) >= 15, outcomes  # neither is rare
    assert not (directory / "run").exists()


def runnable(limit):
    """Seeds of configurations that work and fit the eight devices of the tests."""
    found = []
    for seed in range(1000, 10_000):
        c = draw(seed)
        if works(c) and sum(math.prod(mesh.values()) for mesh in meshes(c) or []) <= 8:
            found.append(seed)
        if len(found) == limit:
            break
    return found


def check_that_it_runs(seed, directory, capsys):
    c = draw(seed)
    assert main([*arguments(c, directory), "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert main(arguments(c, directory)) == 0, capsys.readouterr().err
    events = [json.loads(line) for line in (directory / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 1
    assert abs(steps[0]["loss"] - math.log(c["model.vocab_size"] or 258)) < 0.5
    assert steps[0]["grad_norm"] > 0
    out = capsys.readouterr().out
    placement = told[: next(i for i, line in enumerate(told) if line.startswith("data: "))]
    assert "\n".join(placement) in out  # what the dry run said is what the run says


@pytest.mark.parametrize("seed", runnable(4))
def test_what_is_accepted_runs(seed, directory, capsys):
    check_that_it_runs(seed, directory, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", runnable(44)[4:])
def test_whatever_is_accepted_runs(seed, directory, capsys):
    check_that_it_runs(seed, directory, capsys)
