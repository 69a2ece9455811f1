"""Lets torchvision's CUDA build import beside a torch that has no CUDA.

Its compiled library cannot load there, and `import torchvision` then fails because the
operator `torchvision::nms` is not registered. SGLang needs only torchvision's Python parts,
so declaring the operators is enough. The `.pth` file beside this module installs the finder
at interpreter start; torch is imported only if torchvision is.
"""

import sys
from importlib.abc import MetaPathFinder

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_keep_alive = []


class _DeclareOperators(MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first looked for."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                for name in _OPERATORS:
                    library.define(name + _SIGNATURE)
                _keep_alive.append(library)


sys.meta_path.insert(0, _DeclareOperators())
