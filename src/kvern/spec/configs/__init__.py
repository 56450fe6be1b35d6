"""From a model's configuration to what each layer leaves in the cache.

A family's entry is data: the order of its layer kinds, the caches of each kind, what its weights
consist of. A configuration is read strictly; an unknown family or layer kind is refused by name.
"""

from kvern.spec.configs.describe import FAMILIES
from kvern.spec.configs.load import load_model_spec, read_config
from kvern.spec.configs.reader import MissingFieldError

__all__ = ["FAMILIES", "MissingFieldError", "load_model_spec", "read_config"]
