"""What a dry run says of bytes, parameters and files is what a real run makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jax_titan.cli import main
from jax_titan.config import ConfigError, load
from jax_titan.trainer.build import build_layout, build_model, build_optimizer
from jax_titan.trainer.devices import choose_devices
from jax_titan.trainer.placement import Placement

SMALL = (
    "--model.layers 4 --model.dim 32 --model.heads 4 --model.kv_heads 2 --model.ffn_dim 48 --model.vocab_size 302 "
    "--data.tokenizer bytes --model.tied true --train.sequence_length 16 --train.batch 16 --train.microbatches 2"
).split()
LAYOUTS = [
    "--pipeline.stages 4",
    "--pipeline.stages 2 --parallel.tensor 2 --parallel.fsdp 2 --optimizer.state_dtype bfloat16",
    "--pipeline.stages 3 --pipeline.fsdp 1,2,1",
    "--pipeline.stages 2 --parallel.data 2 --model.tied false --model.vocab_size 301 --parallel.tensor 2",
    "--parallel.layout spmd --parallel.data 2 --parallel.fsdp 2 --parallel.tensor 2",
    "--parallel.layout spmd",
]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_the_bytes_of_each_device_are_those_of_the_arrays_that_a_run_makes(flags):
    config = load("llama3-debug", [*SMALL, *flags.split()])
    model, optimizer = build_model(config, config.model.vocab_size), build_optimizer(config)
    placement = Placement.of(config, model, optimizer)
    devices = choose_devices(config)
    layout = build_layout(config, model, optimizer, devices)
    layout.compile()
    state = layout.init(0)
    held = {device: 0 for device in devices}
    for leaf in jax.tree.leaves(state):
        if leaf.ndim or leaf.dtype.kind == "i":  # not the sum of the losses, which belongs to no unit
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
    assert placement.devices == len(devices)
    for stage in placement.stages:
        between_steps = stage.state_bytes
        if placement.layout == "spmd":
            between_steps -= stage.gradient_bytes  # made and let go of within a step
        assert [held[devices[i]] for i in stage.devices] == [between_steps] * len(stage.devices)
    assert sum(stage.parameters for stage in placement.stages) == placement.parameters


MEASURED = """
import sys, time
start = time.perf_counter()
from jax_titan.cli import main
code = main(sys.argv[1:])
from jax_titan.observability.env import host_peak_bytes
print(code, host_peak_bytes(), time.perf_counter() - start, file=sys.stderr)
"""


@pytest.mark.parametrize("layout", ["--pipeline.stages 16 --parallel.tensor 8", "--parallel.layout spmd"])
def test_a_dry_run_of_405_billion_parameters_takes_little_memory_and_writes_nothing(layout, tmp_path):
    flags = [*layout.split(), "--train.batch", "64", "--train.microbatches", "64", "--parallel.fsdp", "1"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            MEASURED,
            "train",
            "llama3.1-405b",
            *flags,
            "--data.tokenizer",
            "bytes",
            "--dry-run",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "HOME": str(tmp_path)},
    )
    code, peak_bytes, seconds = done.stderr.split()[-3:]
    assert code == "0", done.stderr
    assert int(peak_bytes) < 1e9
    assert float(seconds) < 30  # about 3; the bound leaves room for a busy machine
    assert "405,853,388,800 parameters in 128 units" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_scripts_is_one_object_and_knows_where_a_run_would_go_on(tmp_path, capsys):
    flags = [*SMALL, "--run.dir", str(tmp_path / "run"), "--train.steps", "20"]
    flags += ["--pipeline.stages", "2", "--eval.every", "0", "--eval.batches", "1"]
    for resume_step in (0, 2):
        assert main(["train", "llama3-debug", *flags, "--dry-run", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["resume_step"], told["steps"], told["tokens_per_step"]) == (resume_step, 20, 256)
        assert told["devices"] == len(told["stages"]) == 2
        assert told["stages"][0]["state_bytes"] == sum(
            told["stages"][0][f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer")
        )
        assert main(["train", "llama3-debug", *flags, "--train.stop_after", "2"]) in (0, 75)
        capsys.readouterr()
    assert main(["train", "llama3-debug", *flags, "--train.stop_after", "2", "--dry-run"]) == 0
    assert f"would do nothing: {tmp_path / 'run'} is complete at step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--parallel.fsdp 4 --pipeline.stages 3",
            "parallel.fsdp: the layout needs 12 devices and this machine has 8 (cpu)",
        ),
        (
            "--pipeline.data 1,4,4 --pipeline.stages 3",
            "pipeline.data: the layout needs 9 devices and this machine has 8 (cpu)",
        ),
        (
            "--platform.name cpu --parallel.layout spmd --parallel.data 8192 --train.batch 16384",
            "parallel.data: the layout needs 8192 devices and platform cpu makes at most 4096 virtual ones",
        ),
    ],
)
def test_a_layout_that_needs_more_devices_than_there_are_is_one_line(flags, problem):
    way_out = "" if "--platform" in flags else ", or --platform.name cpu for virtual devices"
    with pytest.raises(ConfigError) as caught:
        choose_devices(load("llama3-debug", [*SMALL, *flags.split()]))
    assert caught.value.problems == [f"{problem}; use fewer{way_out}"]


def test_nothing_is_made_where_a_dry_run_looks(tmp_path: Path, capsys):
    run = tmp_path / "deep" / "run"
    assert (
        main(["train", "llama3-debug", "--run.dir", str(run), "--data.cache", str(tmp_path / "c"), "--dry-run"])
        == 0
    )
    assert "would start" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
