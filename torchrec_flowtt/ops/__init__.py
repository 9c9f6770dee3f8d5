"""The operators in namespace ``flowtt``: schemas, fake kernels, autograd, and the C++ library.

Importing this package registers everything; the operators are then called as
``torch.ops.flowtt.tt_embedding_bag(...)``. A checkout without a compiled library imports too, and
an operator called without its kernel says what is missing.
"""

from torchrec_flowtt.ops import schemas  # noqa: I001  (schemas first: the others register on them)
from torchrec_flowtt.ops import autograd, fake, library
from torchrec_flowtt.ops.library import cpu_kernel_level, cuda_kernels_built, library_path

schemas.define()
fake.register()
autograd.register()
library.load()

__all__ = ["cpu_kernel_level", "cuda_kernels_built", "library_path"]
