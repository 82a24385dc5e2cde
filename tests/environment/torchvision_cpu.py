"""Lets the CUDA-linked torchvision of the package index be imported beside a CPU build of torch.

SGLang imports torchvision unconditionally. Without CUDA libraries torchvision's extension cannot
load, so the operators for which its Python part registers meta kernels are not defined. A `.pth`
file next to this module imports it at start-up; it declares the two schemas just before torchvision
is imported. It provides no kernels, as the operators are never called.
"""

import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision:
    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls.library is None:
            import torch

            if torch.version.cuda is None:
                cls.library = torch.library.Library("torchvision", "FRAGMENT")
                for schema in SCHEMAS:
                    cls.library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision)
