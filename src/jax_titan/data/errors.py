"""The one error of this room."""


class DataError(ValueError):
    """Bad data or a bad place for it: one line that names the field, the value and the way out."""
