"""The configuration: reading, layering, refusing, and recording it."""

import dataclasses
import os
import random
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from jax_titan.config import (
    CHECKS,
    FIELDS,
    FIXED,
    SECTIONS,
    Config,
    ConfigError,
    Field,
    Value,
    fixed_differences,
    from_toml,
    load,
    presets,
    to_toml,
)

PRESET = "llama3-debug"
SEED = 20240229


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems_of(*flags: str, source: str = PRESET) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(source, flags)
    return caught.value.problems


def get(config: Config, name: str) -> Value:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def replaced(config: Config, **by_name: Value) -> Config:
    """The configuration with other values; `train__steps` stands for train.steps."""
    for name, value in by_name.items():
        section, key = name.split("__")
        part = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: part})
    return config


# -------------------------------------------------------------------------------------------------- the table


def test_every_field_has_help_a_default_of_its_type_and_a_place_in_config():
    assert list(FIELDS) == [
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(SECTIONS[section.name])
    ]
    for name, item in FIELDS.items():
        assert item.help, name
        assert type(item.default) is item.type
        assert get(Config(), name) == item.default
        assert item.objection(item.default) is None
        assert item.choices == (get_args(item.annotation) if item.choices else ())


def test_every_preset_loads_and_the_debug_preset_needs_four_devices():
    assert PRESET in presets()
    for name in presets():
        assert load(name, []).run.dir == os.path.join("runs", name)
    config = load(PRESET, [])
    assert config.devices_needed == 4
    assert config.units == 6
    assert load(PRESET, ["--parallel.layout=spmd", "--parallel.data=3"]).devices_needed == 3


# ------------------------------------------------------------------------------------------------ good values


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--train.steps", "7", "--optimizer.warmup_steps=1"], "train.steps", 7),
        (["--train.stop-after", "8"], "train.stop_after", 8),
        (["--train.stop_after=8"], "train.stop_after", 8),
        (["--model.tied", "true"], "model.tied", True),
        (["--model.tied=false"], "model.tied", False),
        (["--optimizer.learning_rate", "1e-4"], "optimizer.learning_rate", 1e-4),
        (["--optimizer.learning-rate", "1"], "optimizer.learning_rate", 1.0),
        (["--data.text_field", "-body"], "data.text_field", "-body"),
        (["--data.text_field=--body"], "data.text_field", "--body"),
        (["--data.text_field", "a=b c"], "data.text_field", "a=b c"),
        (["--data.text_field", "'\"\\é"], "data.text_field", "'\"\\é"),
        (["--platform.name="], "platform.name", ""),
        (["--platform.name", ""], "platform.name", ""),
        (["--train.batch", "16", "--train.batch=16"], "train.batch", 16),
        (["--platform.name", "cpu", "--platform.devices", "8"], "platform.devices", 8),
        (["--parallel.layout", "spmd", "--pipeline.stages", "99"], "pipeline.stages", 99),
    ],
)
def test_flag_sets_its_field(flags: list[str], name: str, value: Value):
    found = get(load(PRESET, flags), name)
    assert found == value
    assert type(found) is type(value)


def test_flags_win_over_file_over_preset_over_defaults(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(f'preset = "{PRESET}"\n[train]\nsteps = 50\nbatch = 48\n[model]\nnorm_eps = 1\n')
    config = load(str(file), ["--train.batch", "96"])
    in_preset = tomllib.loads(presets()[PRESET])
    assert config.train.batch == 96
    assert config.train.steps == 50
    assert config.optimizer.warmup_steps == in_preset["optimizer"]["warmup_steps"]
    assert config.checkpoint.keep == FIELDS["checkpoint.keep"].default
    assert config.run.dir == os.path.join("runs", "mine")
    assert config.model.norm_eps == 1.0
    assert type(config.model.norm_eps) is float


def test_preset_wins_over_a_directory_of_its_name(tmp_path: Path):
    (tmp_path / PRESET).mkdir()
    assert load(PRESET, []).run.dir == os.path.join("runs", PRESET)


def test_paths_lose_their_tilde_and_the_corpus_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "corpus.txt").write_text("text")
    config = load(PRESET, ["--data.path", "~/corpus.txt", "--run.dir", "~/run"])
    assert config.data.path == str(tmp_path / "corpus.txt")
    assert config.run_dir == tmp_path / "run"
    assert config.cache_dir == tmp_path / ".cache" / "jax-titan" / "data"
    assert load(PRESET, ["--data.path", "corpus.txt"]).data.path == config.data.path
    assert load(PRESET, ["--data.cache", "~/c"]).cache_dir == tmp_path / "c"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert config.cache_dir == Path("/elsewhere/jax-titan/data")


# ---------------------------------------------------------------------------------------------- bad arguments

BAD_FLAGS = {
    "--train.seqlen 128": "train.seqlen: unknown; did you mean train.sequence_length?",
    "--trian.steps 3": "trian.steps: unknown; did you mean train.steps?",
    "--train.learning_rate 3": "train.learning_rate: unknown; did you mean optimizer.learning_rate?",
    "--steps 3": "steps: unknown; did you mean train.steps?",
    "--qqq.zzz 3": "qqq.zzz: unknown; `jax-titan train --help` lists all fields",
    "--train 3": "train: unknown; `jax-titan train --help` lists all fields",
    "--train.batch abc": "train.batch: 'abc' is not an integer",
    "--train.batch 1.0": "train.batch: '1.0' is not an integer",
    "--train.batch=": "train.batch: '' is not an integer",
    "--model.tied yes": "model.tied: 'yes' is not a boolean; use true or false",
    "--model.tied True": "model.tied: 'True' is not a boolean; use true or false",
    "--optimizer.b1 x": "optimizer.b1: 'x' is not a number",
    "--optimizer.eps nan": "optimizer.eps: nan is not a finite number",
    "--optimizer.eps=-inf": "optimizer.eps: -inf is not a finite number",
    "--model.rope_theta 1e400": "model.rope_theta: inf is not a finite number",
    f"--train.steps {10**20}": "train.steps: an integer of more than 64 bits is out of range",
    "--train.steps": "train.steps: the value is missing; write --train.steps 300",
    "--data.path": "data.path: the value is missing; write --data.path VALUE",
    "--train.steps --seed": "train.steps: the value is missing; write --train.steps 300",
    "stray": "'stray': not a flag; write --section.field value",
    "-x": "'-x': not a flag; write --section.field value",
    "--": "'--': not a flag; write --section.field value",
    "--train.steps 5 6": "'6': not a flag; write --section.field value",
    "--pipeline.schedule 1f2b": ("pipeline.schedule: '1f2b' is unknown; did you mean 1f1b? (known: gpipe, 1f1b)"),
    "--model.dtype fp32": (
        "model.dtype: 'fp32' is unknown; did you mean float32? (known: bfloat16, float32, float64)"
    ),
    "--platform.name vax": "platform.name: 'vax' is unknown (known: '', cpu, gpu, cuda, rocm, tpu)",
}


@pytest.mark.parametrize(("line", "problem"), BAD_FLAGS.items())
def test_bad_flag_is_named_with_a_way_out(line: str, problem: str):
    assert problem in problems_of(*line.split())


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_text_that_no_file_can_hold_is_refused(text: str):
    (problem,) = problems_of(f"--run.dir={text}")
    assert problem == f"run.dir: {text!r} has a NUL or is not Unicode text"


OUT_OF_RANGE = {
    **{
        f"{name} {low}": f"{name}: {low} is too small; use {low + 1} or more"
        for names, low in [
            (
                "model.layers model.dim model.heads model.kv_heads model.ffn_dim data.vocab_size train.steps",
                0,
            ),
            ("train.batch train.microbatches train.sequence_length checkpoint.keep parallel.data", 0),
            ("parallel.fsdp parallel.tensor parallel.context pipeline.stages pipeline.chunks", 0),
            ("run.seed model.head_dim model.vocab_size train.stop_after optimizer.warmup_steps", -1),
            ("eval.every eval.batches checkpoint.every platform.devices", -1),
        ]
        for name in names.split()
    },
    **{
        f"{name} 0": f"{name}: 0.0 is too small; use more than 0"
        for name in ("model.rope_theta", "model.norm_eps", "model.init_std", "optimizer.learning_rate")
    },
    **{
        f"optimizer.{key} -0.5": f"optimizer.{key}: -0.5 is too small; use 0 or more"
        for key in ("final_fraction", "b1", "b2", "weight_decay", "clip_norm")
    },
    **{
        f"{name} 1": f"{name}: 1.0 is too large; use less than 1"
        for name in ("optimizer.b1", "optimizer.b2", "data.validation_fraction")
    },
    **{f"{name} 2": f"{name}: 2 is not supported yet; use 1" for name in ("parallel.context", "pipeline.chunks")},
    "optimizer.final_fraction 1.5": "optimizer.final_fraction: 1.5 is too large; use 1 or less",
    "data.validation_fraction -1": "data.validation_fraction: -1.0 is too small; use 0 or more",
    f"run.seed {2**32}": f"run.seed: {2**32} is too large; use {2**32 - 1} or less",
}


@pytest.mark.parametrize(("setting", "problem"), OUT_OF_RANGE.items())
def test_value_out_of_range_is_the_only_problem(setting: str, problem: str):
    name, text = setting.split()
    assert problems_of(f"--{name}", text) == [problem]


def test_every_number_has_a_least_value():
    for name, item in FIELDS.items():
        if item.type in (int, float):
            assert item.objection(item.type("-9")), name


CONTRADICTIONS = {
    "--model.dim 250": ("model.dim: 250 is not a multiple of the 4 model.heads; change it, or set model.head_dim"),
    "--model.dim 12": "model.dim: 12 makes heads of 3, but rotary positions turn pairs; use an even width",
    "--model.head_dim 33": ("model.head_dim: 33 is odd, but rotary positions turn pairs; use an even number"),
    "--model.kv_heads 3": "model.kv_heads: 3 does not divide the 4 model.heads; use a divisor of 4",
    "--model.vocab_size 2000": (
        "model.vocab_size: 2000 is less than the 2048 tokens of the bpe tokenizer; use 0 or at least 2048"
    ),
    "--data.tokenizer bytes --model.vocab_size 256": (
        "model.vocab_size: 256 is less than the 258 tokens of the bytes tokenizer; use 0 or at least 258"
    ),
    "--data.vocab_size 257": (
        "data.vocab_size: 257 is too small for a BPE; use at least 258 (256 bytes, begin and end of document)"
    ),
    "--data.text_field=": ("data.text_field: '' is empty; name the field of the JSON lines, such as text"),
    "--train.batch 25": ("train.batch: 25 is not a multiple of the 8 train.microbatches; change one of them"),
    **{
        f"--parallel.layout {layout} --parallel.data 2": (
            "parallel.data: data 2 x fsdp 1 does not divide the 3 sequences of a microbatch "
            "(train.batch / train.microbatches); change one of them"
        )
        for layout in ("spmd", "mpmd")
    },
    "--parallel.data 3 --pipeline.fsdp 1,2,1,1": (
        "pipeline.fsdp: data 3 x fsdp 2 does not divide the 3 sequences of a microbatch "
        "(train.batch / train.microbatches); change one of them"
    ),
    "--parallel.fsdp 3 --model.dim 128": ("parallel.fsdp: 3 does not divide model.dim 128; change one of them"),
    "--parallel.tensor 4": "parallel.tensor: 4 does not divide model.kv_heads 2; change one of them",
    "--parallel.tensor 8 --model.kv_heads 8 --model.heads 8 --model.ffn_dim 92": (
        "parallel.tensor: 8 does not divide model.ffn_dim 92; change one of them"
    ),
    "--parallel.tensor 3 --model.kv_heads 3 --model.heads 6 --model.head_dim 8 --model.ffn_dim 4": (
        "parallel.tensor: 3 does not divide model.ffn_dim 4; change one of them"
    ),
    "--pipeline.tensor 1,2,4,1 --model.kv_heads 4 --model.heads 4 --model.ffn_dim 90": (
        "pipeline.tensor: 4 does not divide model.ffn_dim 90; change one of them"
    ),
    "--pipeline.tensor 1,2": "pipeline.tensor: 2 numbers for 4 pipeline.stages; write one for each stage",
    "--pipeline.data 1,x,1,1": (
        "pipeline.data: 'x' is not a number of parts; write one for each stage, such as 1,2,1"
    ),
    "--pipeline.fsdp 1,0,1,1": (
        "pipeline.fsdp: '0' is not a number of parts; write one for each stage, such as 1,2,1"
    ),
    "--parallel.scan_layers true": (
        "parallel.scan_layers: true is for parallel.layout spmd; use false, or that layout"
    ),
    "--train.remat ful": (
        "train.remat: 'ful' is unknown; did you mean full? (known: none, full, dots, or a list of query, key, "
        "value, attention, attention_out, ffn_gate, ffn_up, ffn_out)"
    ),
    "--model.rope_factor 8 --model.rope_high_freq_factor 1": (
        "model.rope_high_freq_factor: 1.0 is not more than model.rope_low_freq_factor 1.0; use 4 and 1"
    ),
    "--model.init_from nowhere": (
        "model.init_from: 'CWD/nowhere' has no checkpoints; name the directory of a run, or nothing"
    ),
    "--data.tokenizer huggingface --data.tokenizer_file nowhere": (
        "data.tokenizer_file: 'CWD/nowhere' does not exist"
    ),
    "--data.tokenizer bytes --data.tokenizer_file file.txt": (
        "data.tokenizer_file: 'CWD/file.txt' is not for tokenizer bytes, which needs none; leave it empty"
    ),
    "--data.mixture a=1 --data.path file.txt": (
        "data.mixture: it names the corpora, and so does data.path; leave one of them empty"
    ),
    "--pipeline.stages 9": (
        "pipeline.stages: 9 is more than the 6 units of the model (embed, 4 layers, head); "
        "use at most 6 or more model.layers"
    ),
    "--platform.devices 8 --platform.name gpu": (
        "platform.devices: 8 is for platform cpu, but platform.name is gpu; use 0"
    ),
    "--platform.devices 3": ("platform.devices: 3 is less than the 4 the layout needs; use 0 or at least 4"),
    "--run.dir file.txt": "run.dir: 'file.txt' is a file; name a directory",
    "--run.dir file.txt/run": "run.dir: 'file.txt' is a file; name a directory",
}


@pytest.mark.parametrize(("line", "problem"), CONTRADICTIONS.items())
def test_contradiction_is_the_only_problem(line: str, problem: str, tmp_path: Path):
    (tmp_path / "file.txt").write_text("text")
    assert problems_of(*line.split()) == [problem.replace("CWD", os.getcwd())]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.txt", "does not exist"),
        ("empty.txt", "is empty"),
        ("nothing", "holds no *.txt, *.jsonl (plain, .gz or .xz) or *.parquet files"),
        ("hollow", "is empty"),
    ],
)
def test_corpus_without_text_is_refused(path: str, words: str, tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "picture.png").write_text("x")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "a.txt").touch()
    (problem,) = problems_of("--data.path", path)
    assert problem.startswith(f"data.path: {tmp_path / path} {words}; ")


def test_corpus_may_be_a_file_or_a_directory_at_any_depth(tmp_path: Path):
    (tmp_path / "books" / "old").mkdir(parents=True)
    (tmp_path / "books" / "old" / "a.txt").write_text("text")
    assert load(PRESET, ["--data.path", "books"])
    assert load(PRESET, ["--data.path", "books/old/a.txt"])


def test_of_a_flag_given_twice_the_last_counts():
    config = load(PRESET, "--train.batch 8 --train.batch=16 --train.stop-after 1 --train.stop_after 2".split())
    assert (config.train.batch, config.train.stop_after) == (16, 2)


def test_a_short_run_may_end_within_its_warm_up_and_before_its_stop():
    config = load(PRESET, "--train.steps 3 --optimizer.warmup_steps 20 --train.stop_after 50".split())
    assert (config.train.steps, config.optimizer.warmup_steps, config.train.stop_after) == (3, 20, 50)


def test_head_dim_frees_dim_from_heads():
    assert load(PRESET, ["--model.dim", "250", "--model.head_dim", "64"]).model.head_dim == 64


# ------------------------------------------------------------------------------------------ all of it at once


def test_all_problems_come_together_and_fields_that_are_fine_are_still_compared():
    line = (
        "--train.seqlen 9 --train.batch abc --model.tied yes stray --optimizer.eps nan "
        "--optimizer.clip_norm -1 --pipeline.stages 9 --model.kv_heads 3 "
        "--data.path no --train.steps"
    )
    assert [problem.partition(";")[0] for problem in problems_of(*line.split())] == [
        "train.seqlen: unknown",
        "'stray': not a flag",
        "train.steps: the value is missing",
        "train.batch: 'abc' is not an integer",
        "model.tied: 'yes' is not a boolean",
        "optimizer.eps: nan is not a finite number",
        "optimizer.clip_norm: -1.0 is too small",
        "model.kv_heads: 3 does not divide the 4 model.heads",
        f"data.path: {os.path.abspath('no')} does not exist",
        "pipeline.stages: 9 is more than the 6 units of the model (embed, 4 layers, head)",
    ]


def test_checks_that_need_a_bad_field_say_nothing():
    assert problems_of("--model.heads", "x", "--model.dim", "0", "--train.steps", "none") == [
        "model.heads: 'x' is not an integer",
        "model.dim: 0 is too small; use 1 or more",
        "train.steps: 'none' is not an integer",
    ]


def test_every_check_is_met_by_the_tables_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file.txt").write_text("text")
    monkeypatch.setattr("jax_titan.config.checks.CHECKS", ())
    bad = [load(PRESET, line.split()) for line in [*CONTRADICTIONS, "--data.path missing"]]
    assert [check for check in CHECKS if not any(map(check, bad))] == []


# ------------------------------------------------------------------------------------------------------- TOML

BAD_TOML = {
    'train.batch = "abc"': "x.toml: train.batch: 'abc' is not an integer",
    "train.batch = 24.0": "x.toml: train.batch: 24.0 is not an integer",
    "train.batch = true": "x.toml: train.batch: true is not an integer",
    "model.tied = 1": "x.toml: model.tied: 1 is not a boolean; use true or false",
    'model.tied = "true"': "x.toml: model.tied: 'true' is not a boolean; use true or false",
    "optimizer.b1 = false": "x.toml: optimizer.b1: false is not a number",
    "optimizer.eps = nan": "x.toml: optimizer.eps: nan is not a finite number",
    "data.path = 3": "x.toml: data.path: 3 is not a string",
    "data.path = [1]": "x.toml: data.path: an array is not a string",
    "data.path = 2020-01-01": "x.toml: data.path: 2020-01-01 is not a string",
    "[train.steps]\nx = 1": "x.toml: train.steps: a table is not an integer",
    "train.seqlen = 1": "x.toml: train.seqlen: unknown; did you mean train.sequence_length?",
    "[trian]\nsteps = 1": "x.toml: trian: unknown section; did you mean train?",
    "[zzz]": f"x.toml: zzz: unknown section; sections are {', '.join(SECTIONS)}",
    "steps = 1": "x.toml: steps: unknown; did you mean train.steps?",
    "train = 1": "x.toml: train: 1 is not a section; write [train]",
    "preset = 1": "x.toml: preset: 1 is not a string",
    'preset = "llama3-debgu"': (
        "x.toml: preset: 'llama3-debgu' is unknown; did you mean llama3-debug? "
        f"(known: {', '.join(presets())}, or a FILE.toml)"
    ),
    'pipeline.schedule = "gpip"': (
        "x.toml: pipeline.schedule: 'gpip' is unknown; did you mean gpipe? (known: gpipe, 1f1b)"
    ),
    "train.batch = 0": "x.toml: train.batch: 0 is too small; use 1 or more",
    "train.batch = 0x" + "f" * 9000: ("x.toml: train.batch: an integer of more than 64 bits is out of range"),
    "optimizer.b1 = 0x" + "f" * 9000: "x.toml: optimizer.b1: an integer of more than 64 bits is not a number",
    "train.batch = 25": "train.batch: 25 is not a multiple of the 8 train.microbatches; change one of them",
}


@pytest.mark.parametrize(("text", "problem"), BAD_TOML.items(), ids=[text[:30] for text in BAD_TOML])
def test_bad_toml_is_named_with_its_file(text: str, problem: str, tmp_path: Path):
    (tmp_path / "x.toml").write_text(text)
    assert problems_of(source="x.toml") == [problem]


def test_problems_of_file_and_flags_come_together(tmp_path: Path):
    (tmp_path / "x.toml").write_text('[train]\nbatch = "abc"\nseqlen = 3\n[zzz]\n')
    assert problems_of("--model.tied", "yes", "--model.kv_heads", "3", source="x.toml") == [
        "x.toml: train.batch: 'abc' is not an integer",
        "x.toml: train.seqlen: unknown; did you mean train.sequence_length?",
        f"x.toml: zzz: unknown section; sections are {', '.join(SECTIONS)}",
        "model.tied: 'yes' is not a boolean; use true or false",
        "model.kv_heads: 3 does not divide the 4 model.heads; use a divisor of 4",
    ]


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (b"[train]\nsteps = \n", "x.toml:2: Invalid value"),
        (b"[train]\nsteps = 1\nsteps = 2\n", "x.toml:3: Cannot overwrite a value"),
        (b"[train]\n[train]\n", "x.toml:2: Cannot declare"),
        (b'[run]\ndir = "', "x.toml:2: Unterminated string"),
        (b"x = " + b"9" * 5000, "x.toml:1: a value is too long or too deep"),
        (b"x = " + b"[" * 50000, "x.toml:1: a value is too long or too deep"),
        (b"\xff\xfe", "x.toml: not a TOML file, which is UTF-8 text"),
    ],
)
def test_toml_syntax_error_names_file_and_line(content: bytes, start: str, tmp_path: Path):
    (tmp_path / "x.toml").write_bytes(content)
    (problem,) = problems_of(source="x.toml")
    assert problem.startswith(start)


def test_source_that_is_not_there_is_named(tmp_path: Path):
    known = ", ".join(presets())
    assert problems_of(source="lama3-debug") == [
        f"preset: 'lama3-debug' is unknown; did you mean llama3-debug? (known: {known}, or a FILE.toml)"
    ]
    assert problems_of(source="") == [f"preset: '' is unknown (known: {known}, or a FILE.toml)"]
    assert problems_of(source="other.toml") == ["other.toml: no such file"]
    assert problems_of(source="dir/other") == ["dir/other: no such file"]
    (tmp_path / "run").mkdir()
    assert problems_of(source="run") == ["run: is a directory; name a preset or a TOML file"]
    (tmp_path / "run" / "config.toml").touch()
    assert problems_of(source="run") == ["run: is a directory; did you mean run/config.toml?"]


# -------------------------------------------------------------------------------------- random configurations

TEXTS = [
    "",
    "plain",
    "a b",
    'quo"te',
    "back\\slash",
    "'",
    "é漢🙂",
    "tab\tnew\nline",
    "\x7f\x01",
    "#x = 1",
    "-x",
    "--y",
    "a=b",
]


def random_value(rng: random.Random, item: Field) -> Value:
    if item.choices:
        return rng.choice(item.choices)
    if item.type is bool:
        return rng.random() < 0.5
    if item.type is str:
        return "".join(rng.choices(TEXTS, k=rng.randrange(3)))
    low = item.limits.at_least if item.limits.at_least is not None else item.limits.above or 0
    if item.type is int:
        drawn = int(low) + rng.randrange(2 ** rng.randrange(1, 31))
        return 1 if item.limits.supported else min(drawn, int(item.limits.at_most or drawn))
    return low + rng.choice([rng.random() * 0.9 + 1e-9, 1e-9 * rng.random() + 1e-12, 1e-12])


def random_config(rng: random.Random) -> Config:
    """Fields valid one by one, mostly not together."""
    return replaced(Config(), **{name.replace(".", "__"): random_value(rng, FIELDS[name]) for name in FIELDS})


def test_toml_gives_back_exactly_what_it_got():
    rng = random.Random(SEED)
    for _ in range(100):
        config = random_config(rng)
        assert from_toml(to_toml(config), "saved") == config
    assert to_toml(config).startswith("# ")
    assert from_toml("", "saved") == Config()


# Values that go together, so that `load` accepts any choice of them.
COMPATIBLE: dict[str, list[str]] = {
    "run.dir": ["run", "-r", "é b", "'\"\\"],
    "run.seed": ["0", "4294967295"],
    "model.layers": ["4", "12"],
    "model.head_dim": ["0", "32"],
    "model.rope_theta": ["1e4", "500000", "1_000.5"],
    "model.tied": ["true", "false"],
    "model.dtype": ["bfloat16", "float64"],
    "data.text_field": ["-t", "--t", "a=b", " x "],
    "data.tokenizer": ["bytes", "bpe"],
    "data.validation_fraction": ["0", ".5"],
    "train.batch": ["24", " 48 ", "+96"],
    "train.stop_after": ["0", "8"],
    "optimizer.schedule": ["cosine", "constant"],
    "parallel.layout": ["mpmd", "spmd"],
    "pipeline.schedule": ["gpipe", "1f1b"],
    "platform.name": ["", "cpu"],
    "platform.devices": ["0", "8"],
}


def test_tyro_and_the_fields_themselves_read_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rng = random.Random(SEED)
    for _ in range(40):
        chosen = {name: rng.choice(texts) for name, texts in COMPATIBLE.items() if rng.random() < 0.5}
        flags = [f"--{rng.choice([name, name.replace('_', '-')])}={text}" for name, text in chosen.items()]
        by_tyro = load(PRESET, flags)
        with monkeypatch.context() as patch:
            patch.setattr("jax_titan.config.flags._typed_by_tyro", lambda default, flags: None)
            assert load(PRESET, flags) == by_tyro
        for name, text in chosen.items():
            assert get(by_tyro, name) == FIELDS[name].from_text(text)


def test_saved_record_of_a_run_loads_as_the_same_configuration(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("text")
    config = load(PRESET, ["--data.path", "corpus.txt", "--model.tied", "true", "--run.dir", "r"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_text(to_toml(config))
    assert load("r/config.toml", []) == config
    (tmp_path / "corpus.txt").unlink()
    assert from_toml(to_toml(config), "config.toml") == config  # the corpus may be gone when a record is read


def test_the_record_of_a_run_goes_on_with_the_run_it_lies_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(PRESET, ["--run.dir", "somewhere/else"])
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.toml").write_text(to_toml(config))
    assert load("moved/config.toml", []).run.dir == "moved"
    assert load(str(tmp_path / "moved" / "config.toml"), []).run.dir == str(tmp_path / "moved")
    assert load("moved/config.toml", ["--run.dir", "other"]).run.dir == "other"
    monkeypatch.chdir(tmp_path / "moved")
    assert load("config.toml", []).run.dir == "."


# ----------------------------------------------------------------------------------------------------- resume


def test_fixed_fields_are_those_that_decide_the_numbers():
    may_change = {
        *("run.dir", "data.cache", "train.steps", "train.stop_after", "train.microbatches"),
        *("train.remat", "train.loss_chunk", "train.loss_accumulator"),
        *(
            name
            for name in FIELDS
            if name.split(".")[0] in ("eval", "checkpoint", "parallel", "pipeline", "platform")
        ),
    }
    assert set(FIXED) == set(FIELDS) - may_change


def test_each_fixed_field_that_differs_has_a_line_and_no_other_field_has():
    rng = random.Random(SEED)
    saved, now = Config(), random_config(rng)
    expected = [name for name in FIXED if get(saved, name) != get(now, name)]
    lines = fixed_differences(saved, now)
    assert [line.split(":")[0] for line in lines] == expected
    assert fixed_differences(now, now) == []
    changed = replaced(saved, model__dim=128, model__tied=True, data__tokenizer="bytes", train__steps=9)
    assert fixed_differences(saved, changed) == [
        "model.dim: 256 in the run, 128 now",
        "model.tied: false in the run, true now",
        "data.tokenizer: 'bpe' in the run, 'bytes' now",
    ]


def test_same_corpus_by_another_path_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    saved = replaced(Config(), data__path=str(tmp_path / "a.txt"))
    for path in ("a.txt", "./a.txt", "x/../a.txt", "~/a.txt"):
        assert fixed_differences(saved, replaced(Config(), data__path=path)) == []
    assert len(fixed_differences(saved, replaced(Config(), data__path="b.txt"))) == 1
    assert len(fixed_differences(saved, Config())) == 1


def test_a_mixture_means_the_same_from_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    saved = load(PRESET, ["--data.mixture", "a.txt=3, ./b.txt = 1"])
    assert saved.data.mixture == f"{tmp_path}/a.txt=3,{tmp_path}/b.txt=1"
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fixed_differences(saved, load(PRESET, ["--data.mixture", "../a.txt=3,~/b.txt=1"])) == []
    assert len(fixed_differences(saved, load(PRESET, ["--data.mixture", "../a.txt=3,~/b.txt=2"]))) == 1
