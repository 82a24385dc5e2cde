"""SGLang platform for machines without an accelerator: plain torch, no compiled kernels.

SGLang finds it through its documented entry-point group `sglang.srt.platforms`. It lets the real
server run in tests, in CI and in the demo; it is not part of the kvpolicy package.
"""


def activate() -> str | None:
    """Path of the platform class; None with CUDA, for SGLang's own platform."""
    import torch

    return None if torch.cuda.is_available() else "sgl_cpu_torch.platform.CpuTorchPlatform"
