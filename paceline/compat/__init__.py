"""Foreign spellings of options, and only here: what other systems call things, translated into our words."""

from paceline.compat.flags import Flag, rewrite_flags, takes_value
from paceline.compat.library import read_call, read_request, translate
from paceline.compat.reading import Notices
from paceline.compat.table import SPELLINGS
from paceline.drafters import make

__all__ = [
    "SPELLINGS",
    "Flag",
    "Notices",
    "make",
    "read_call",
    "read_request",
    "rewrite_flags",
    "takes_value",
    "translate",
]
