"""Fields that contradict each other: one check a contradiction, all of them listed at the end."""

import os
from collections.abc import Callable
from typing import Any, cast

from jax_titan.config.draft import Draft
from jax_titan.config.fields import SECTIONS, Value
from jax_titan.config.problems import show, suggestion
from jax_titan.config.sections import KEPT_NAMES, Config, per_stage
from jax_titan.parallel.mesh import AXES, Degrees

BYTE_VOCABULARY = 258  # 256 bytes, begin of document, end of document: the least a tokenizer here can have


def contradictions(draft: Draft) -> list[str]:
    """Problems between the fields; a check that needs a bad field is left out, all others run."""
    config = Config(**{section: cast(Any, _Guarded(section, draft)) for section in SECTIONS})
    problems = []
    for check in CHECKS:
        try:
            problem = check(config)
        except _Unusable:
            continue
        if problem is not None:
            problems.append(problem)
    return problems


class _Unusable(Exception):
    """A check read a field that has a problem of its own."""


class _Guarded:
    """A section in which reading a bad field raises `_Unusable`."""

    def __init__(self, section: str, draft: Draft):
        self._section, self._draft = section, draft

    def __getattr__(self, key: str) -> Value:
        name = f"{self._section}.{key}"
        if name in self._draft.bad:
            raise _Unusable(name)
        return self._draft.values[name]


def _head_width(c: Config) -> str | None:
    m = c.model
    if m.head_dim == 0 and m.dim % m.heads:
        dim, heads = m.dim, m.heads
        return f"model.dim: {dim} is not a multiple of the {heads} model.heads; change it, or set model.head_dim"
    return None


def _head_is_even(c: Config) -> str | None:
    m = c.model
    if m.head_dim % 2:
        return f"model.head_dim: {m.head_dim} is odd, but rotary positions turn pairs; use an even number"
    if m.head_dim == 0 and m.dim % m.heads == 0 and (m.dim // m.heads) % 2:
        width = m.dim // m.heads
        return f"model.dim: {m.dim} makes heads of {width}, but rotary positions turn pairs; use an even width"
    return None


def _heads_share_keys(c: Config) -> str | None:
    heads, kv_heads = c.model.heads, c.model.kv_heads
    if heads % kv_heads:
        return f"model.kv_heads: {kv_heads} does not divide the {heads} model.heads; use a divisor of {heads}"
    return None


def _stretch_is_between_two_lengths(c: Config) -> str | None:
    low, high = c.model.rope_low_freq_factor, c.model.rope_high_freq_factor
    if c.model.rope_factor != 1 and high <= low:
        return (
            f"model.rope_high_freq_factor: {high} is not more than model.rope_low_freq_factor {low}; use 4 and 1"
        )
    return None


def _weights_to_start_from_are_there(c: Config) -> str | None:
    path = c.model.init_from
    if os.path.isdir(c.run_dir / "checkpoints"):
        return None  # the run has weights of its own
    if not path or os.path.isdir(os.path.join(path, "checkpoints")):
        return None
    return f"model.init_from: {show(path)} has no checkpoints; name the directory of a run, or nothing"


def _model_knows_all_tokens(c: Config) -> str | None:
    if c.data.tokenizer in ("llama3", "huggingface") or c.data.tokenizer_file:
        return None  # known when the file is read
    tokens = c.data.vocab_size if c.data.tokenizer == "bpe" else BYTE_VOCABULARY
    if 0 < c.model.vocab_size < tokens:
        have, what = c.model.vocab_size, f"the {tokens} tokens of the {c.data.tokenizer} tokenizer"
        return f"model.vocab_size: {have} is less than {what}; use 0 or at least {tokens}"
    return None


def _bpe_holds_all_bytes(c: Config) -> str | None:
    if c.data.tokenizer == "bpe" and not c.data.tokenizer_file and c.data.vocab_size < BYTE_VOCABULARY:
        least = f"{BYTE_VOCABULARY} (256 bytes, begin and end of document)"
        return f"data.vocab_size: {c.data.vocab_size} is too small for a BPE; use at least {least}"
    return None


def _tokenizer_is_there(c: Config) -> str | None:
    path = c.data.tokenizer_file
    if not path:
        return None
    if c.data.tokenizer == "bytes":
        return f"data.tokenizer_file: {show(path)} is not for tokenizer bytes, which needs none; leave it empty"
    if not os.path.exists(path):
        return f"data.tokenizer_file: {show(path)} does not exist"
    return None


def _corpora_are_there(c: Config) -> str | None:
    if not c.data.mixture:
        return None
    if c.data.path:
        return "data.mixture: it names the corpora, and so does data.path; leave one of them empty"
    from jax_titan.data.corpus import parse_mixture
    from jax_titan.data.errors import DataError

    try:
        parse_mixture(c.data.mixture)
    except DataError as error:
        return str(error)
    return None


def _corpus_is_there(c: Config) -> str | None:
    if not c.data.path:
        return None
    from jax_titan.data.corpus import find_files  # the one place that knows what a corpus may be
    from jax_titan.data.errors import DataError

    try:
        files = find_files(c.data.path)
    except DataError as error:
        return str(error)
    if not any(file.size_bytes for file in files):
        return f"data.path: {c.data.path} is empty; give text, or nothing for the bundled corpus"
    return None


def _text_field_has_a_name(c: Config) -> str | None:
    if not c.data.text_field:
        return "data.text_field: '' is empty; name the field of the JSON lines, such as text"
    return None


def _run_dir_can_be_made(c: Config) -> str | None:
    for path in (c.run_dir, *c.run_dir.parents):
        if os.path.isdir(path):
            return None
        if os.path.exists(path):
            return f"run.dir: {show(str(path))} is a file; name a directory"
    return None


def _microbatches_are_equal(c: Config) -> str | None:
    batch, parts = c.train.batch, c.train.microbatches
    if batch % parts:
        return f"train.batch: {batch} is not a multiple of the {parts} train.microbatches; change one of them"
    return None


def _degrees_are_lists(axis: str) -> Callable[[Config], str | None]:
    def check(c: Config) -> str | None:
        text = getattr(c.pipeline, axis)
        if c.parallel.layout == "spmd":
            return None
        try:
            per_stage(text, getattr(c.parallel, axis), c.pipeline.stages)
        except ValueError as error:
            return f"pipeline.{axis}: {error}"
        return None

    return check


def _degrees(c: Config) -> tuple[Degrees, ...]:
    """The meshes; none when the lists of the pipeline are wrong, of which another check tells."""
    try:
        return c.degrees
    except ValueError:
        return ()


def field_of(c: Config, axis: str) -> str:
    """The field that says how an axis is split, for messages."""
    own = c.parallel.layout == "mpmd" and getattr(c.pipeline, axis).strip()
    return f"pipeline.{axis}" if own else f"parallel.{axis}"


def _sequences_are_shared(c: Config) -> str | None:
    batch, count = c.train.batch, c.train.microbatches
    if batch % count:
        return None  # said by another check
    for degrees in _degrees(c):
        if (batch // count) % degrees.batch_parts:
            axis = "data" if (batch // count) % degrees.data else "fsdp"
            split = f"data {degrees.data} x fsdp {degrees.fsdp}"
            have = f"{batch // count} sequences of a microbatch (train.batch / train.microbatches)"
            return f"{field_of(c, axis)}: {split} does not divide the {have}; change one of them"
    return None


def _width_is_shared(c: Config) -> str | None:
    for degrees in _degrees(c):
        if c.model.dim % degrees.fsdp:
            field = field_of(c, "fsdp")
            return f"{field}: {degrees.fsdp} does not divide model.dim {c.model.dim}; change one of them"
    return None


def _products_are_shared(name: str) -> Callable[[Config], str | None]:
    def check(c: Config) -> str | None:
        for degrees in _degrees(c):
            if (size := getattr(c.model, name)) % degrees.tensor:
                field = field_of(c, "tensor")
                return f"{field}: {degrees.tensor} does not divide model.{name} {size}; change one of them"
        return None

    return check


def _scan_is_spmd(c: Config) -> str | None:
    if c.parallel.scan_layers and c.parallel.layout == "mpmd":
        return "parallel.scan_layers: true is for parallel.layout spmd; use false, or that layout"
    return None


def _remat_is_known(c: Config) -> str | None:
    remat = c.train.remat
    if remat in ("none", "full", "dots"):
        return None
    names = [name.strip() for name in remat.split(",")]
    if unknown := [name for name in names if name not in KEPT_NAMES]:
        known = (*("none", "full", "dots"), *KEPT_NAMES)
        return (
            f"train.remat: {show(unknown[0])} is unknown{suggestion(unknown[0], known)} (known: none, full, dots, "
            f"or a list of {', '.join(KEPT_NAMES)})"
        )
    return None


def _stages_have_units(c: Config) -> str | None:
    if c.parallel.layout == "mpmd" and c.pipeline.stages > c.units:
        units = f"{c.units} units of the model (embed, {c.model.layers} layers, head)"
        way_out = f"use at most {c.units} or more model.layers"
        return f"pipeline.stages: {c.pipeline.stages} is more than the {units}; {way_out}"
    return None


def _virtual_devices_are_of_cpu(c: Config) -> str | None:
    if c.platform.devices and c.platform.name not in ("", "cpu"):
        have, name = c.platform.devices, c.platform.name
        return f"platform.devices: {have} is for platform cpu, but platform.name is {name}; use 0"
    return None


def _devices_suffice(c: Config) -> str | None:
    have, need = c.platform.devices, sum(degrees.devices for degrees in _degrees(c))
    if 0 < have < need:
        return f"platform.devices: {have} is less than the {need} the layout needs; use 0 or at least {need}"
    return None


CHECKS: tuple[Callable[[Config], str | None], ...] = (
    _head_width,
    _head_is_even,
    _heads_share_keys,
    _stretch_is_between_two_lengths,
    _weights_to_start_from_are_there,
    _model_knows_all_tokens,
    _bpe_holds_all_bytes,
    _tokenizer_is_there,
    _corpora_are_there,
    _corpus_is_there,
    _text_field_has_a_name,
    _run_dir_can_be_made,
    _microbatches_are_equal,
    *map(_degrees_are_lists, AXES),
    _sequences_are_shared,
    _width_is_shared,
    *map(_products_are_shared, ("kv_heads", "ffn_dim")),  # what divides kv_heads divides heads
    _scan_is_spmd,
    _remat_is_known,
    _stages_have_units,
    _virtual_devices_are_of_cpu,
    _devices_suffice,
)
