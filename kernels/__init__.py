"""Operators: one file an operator, with its contract, a plain torch reference and the public function.

A public function picks its implementation by device. The torch reference runs everywhere and is the oracle of the
Triton kernel beside it. Nothing here knows of models, sessions or requests.
"""

NUMERICS = 3
"""Raised with what changes the numbers that our kernels give, if only in their last bits: state of another arithmetic
is made again from its tokens (decision 23)."""
