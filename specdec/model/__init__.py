"""Finding, converting and loading models.

Importing this package imports neither torch nor transformers: the command line's help stays fast.
"""

from __future__ import annotations

from specdec.model.defaults import eos_token_ids, max_model_len, sampling_defaults
from specdec.model.load import LoadedModel, from_module, load_model
from specdec.model.resolve import resolve_model
from specdec.model.store import ModelRecord, fetch_model, list_models, remove_model

__all__ = [
    "LoadedModel",
    "ModelRecord",
    "eos_token_ids",
    "fetch_model",
    "from_module",
    "list_models",
    "load_model",
    "max_model_len",
    "remove_model",
    "resolve_model",
    "sampling_defaults",
]
