"""Lets the CUDA-linked torchvision of the package index be imported beside a CPU build of torch.

SGLang imports torchvision unconditionally. Without CUDA libraries torchvision's extension cannot
load, so nobody defines the operators that its Python half registers meta kernels for. A `.pth` file
next to this module imports it at start-up; it declares the two schemas just before torchvision is
imported. No kernel is provided: nothing here is ever called.
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
