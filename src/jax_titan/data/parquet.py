"""Parquet files as documents, a row each, by the optional library pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jax_titan.data.errors import DataError

_BATCH_ROWS = 1024  # held in memory at once


def parquet_records(path: Path, source: IO[bytes], fields: tuple[str, ...]) -> Iterator[tuple[bytes, ...]]:
    """The text of each row, and its prompt if there is a second field.

    Args:
        path: of the file, for messages.
        source: the file, open.
        fields: names of the columns: the text, then the prompt.

    Returns:
        An iterator over UTF-8 bytes; null is an empty text.

    Raises:
        DataError: pyarrow is not installed, the file is not Parquet, or lacks a column of text.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"data.path: {path} needs pyarrow; pip install 'jax-titan[parquet]'") from error
    try:
        file = pq.ParquetFile(source)
        schema = file.schema_arrow
        for name, option in zip(fields, ("data.text_field", "data.prompt_field"), strict=False):
            if name not in schema.names:
                raise DataError(f"{option}: {path} has no column '{name}'; it has: {', '.join(schema.names)}")
            kind = schema.field(name).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(f"{option}: {path}: column '{name}' holds {kind}, not text; name another one")
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(dict.fromkeys(fields))):
            columns = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in fields]
            for texts in zip(*columns, strict=True):
                yield tuple((text or "").encode() for text in texts)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"data.path: {path} is not a whole Parquet file ({reason[:200]}); copy it again"
        ) from error
