"""Schemes: how the linears of a model are quantized.

A scheme is a weight format times an activation format (`formats`). `registry` has the schemes with names, `methods` the
ways to turn a float weight into integers of a format, `recipe` says which layer gets which scheme and method.
"""

from .calibration import CalibrationData, Needs
from .formats import ActivationFormat, LinearScheme, Scheme, WeightFormat
from .method import Method, QuantizedWeight, get_method, method_names, register_method
from .recipe import Choice, Recipe
from .registry import CheckpointScheme, LiveScheme, checkpoint_names, checkpoint_scheme, live_names, live_scheme

__all__ = [
    "ActivationFormat",
    "CalibrationData",
    "CheckpointScheme",
    "Choice",
    "LinearScheme",
    "LiveScheme",
    "Method",
    "Needs",
    "QuantizedWeight",
    "Recipe",
    "Scheme",
    "WeightFormat",
    "checkpoint_names",
    "checkpoint_scheme",
    "get_method",
    "live_names",
    "live_scheme",
    "method_names",
    "register_method",
]
