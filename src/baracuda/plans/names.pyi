"""Derived from the plans' declarations; tests/package/test_api.py keeps it so."""

# ruff: noqa: F403, F405

from .declarations import *
from .descriptors import *
from .plan import Plan as Plan
from .produced import *

DequantizePerChannelArgs = QuantizeArgs
DequantizePerChannelBackwardArgs = BackwardArgs
DequantizePerChannelBackwardDescriptor = DequantizePerChannelDescriptor
DequantizePerGroupArgs = QuantizeArgs
DequantizePerGroupBackwardArgs = BackwardArgs
DequantizePerGroupBackwardDescriptor = DequantizePerGroupDescriptor
DequantizePerTensorArgs = QuantizeArgs
DequantizePerTensorBackwardArgs = BackwardArgs
DequantizePerTensorBackwardDescriptor = DequantizePerTensorDescriptor
DequantizePerTokenArgs = QuantizeArgs
DequantizePerTokenBackwardArgs = BackwardArgs
DequantizePerTokenBackwardDescriptor = DequantizePerTokenDescriptor
FakeQuantizeArgs = QuantizeArgs
FakeQuantizeBackwardArgs = BackwardArgs
FakeQuantizeBackwardDescriptor = FakeQuantizeDescriptor
GatedDynamicQuantizeDescriptor = GatedDescriptor
GatedQuantizeDescriptor = GatedDescriptor
NormDynamicQuantizeDescriptor = NormDescriptor
NormQuantizeDescriptor = NormDescriptor
QuantizePerChannelArgs = QuantizeArgs
QuantizePerChannelBackwardArgs = BackwardArgs
QuantizePerChannelBackwardDescriptor = QuantizePerChannelDescriptor
QuantizePerGroupArgs = QuantizeArgs
QuantizePerGroupBackwardArgs = BackwardArgs
QuantizePerGroupBackwardDescriptor = QuantizePerGroupDescriptor
QuantizePerTensorArgs = QuantizeArgs
QuantizePerTensorBackwardArgs = BackwardArgs
QuantizePerTensorBackwardDescriptor = QuantizePerTensorDescriptor
QuantizePerTokenArgs = QuantizeArgs
QuantizePerTokenBackwardArgs = BackwardArgs
QuantizePerTokenBackwardDescriptor = QuantizePerTokenDescriptor
