"""SGLang platform for machines without an accelerator: plain torch, no compiled kernels.

SGLang's documented mechanism (entry-point group `sglang.srt.platforms`). It exists so that the
real server runs in tests, in CI and in the demo; it is not part of the kvpolicy package.
"""


def activate() -> str | None:
    """The platform class, or None where CUDA is present and SGLang's own platform is right."""
    import torch

    return None if torch.cuda.is_available() else "sgl_cpu_torch.platform.CpuTorchPlatform"
