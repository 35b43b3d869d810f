"""Fields that contradict each other: one check a contradiction, all of them listed at the end."""

import os
from collections.abc import Callable
from typing import Any, cast

from jax_titan.config.draft import Draft
from jax_titan.config.fields import SECTIONS, Value
from jax_titan.config.problems import show
from jax_titan.config.sections import Config

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


def _model_knows_all_tokens(c: Config) -> str | None:
    tokens = c.data.vocab_size if c.data.tokenizer == "bpe" else BYTE_VOCABULARY
    if 0 < c.model.vocab_size < tokens:
        have, what = c.model.vocab_size, f"the {tokens} tokens of the {c.data.tokenizer} tokenizer"
        return f"model.vocab_size: {have} is less than {what}; use 0 or at least {tokens}"
    return None


def _bpe_holds_all_bytes(c: Config) -> str | None:
    if c.data.tokenizer == "bpe" and c.data.vocab_size < BYTE_VOCABULARY:
        least = f"{BYTE_VOCABULARY} (256 bytes, begin and end of document)"
        return f"data.vocab_size: {c.data.vocab_size} is too small for a BPE; use at least {least}"
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


def _replicas_are_equal(c: Config) -> str | None:
    batch, parts, replicas = c.train.batch, c.train.microbatches, c.parallel.data
    if batch % parts == 0 and (batch // parts) % replicas:
        have = f"{batch // parts} sequences of a microbatch (train.batch / train.microbatches)"
        return f"parallel.data: {replicas} does not divide the {have}; change one of them"
    return None


def _data_parallel_is_spmd(c: Config) -> str | None:
    if c.parallel.data > 1 and c.parallel.layout == "mpmd":
        way_out = "use 1, or parallel.layout spmd"
        return f"parallel.data: {c.parallel.data} is not supported yet with layout mpmd; {way_out}"
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
    if 0 < c.platform.devices < c.devices_needed:
        have, need = c.platform.devices, c.devices_needed
        return f"platform.devices: {have} is less than the {need} the layout needs; use 0 or at least {need}"
    return None


CHECKS: tuple[Callable[[Config], str | None], ...] = (
    _head_width,
    _head_is_even,
    _heads_share_keys,
    _model_knows_all_tokens,
    _bpe_holds_all_bytes,
    _corpus_is_there,
    _text_field_has_a_name,
    _run_dir_can_be_made,
    _microbatches_are_equal,
    _replicas_are_equal,
    _data_parallel_is_spmd,
    _stages_have_units,
    _virtual_devices_are_of_cpu,
    _devices_suffice,
)
