"""The CPU platform class; see the package's docstring."""

import gc

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sgl_cpu_torch import host_memory

host_memory.stand_in()


class CpuTorchPlatform(SRTPlatform):
    """SGLang's device interface, answered for plain torch on the CPU."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device_total_memory(self, device_id=0):
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device=None):
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id=0):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id=0):
        return "cpu"

    def set_device(self, device):
        pass

    def get_device_name(self, device_id=0):
        return "cpu"

    def get_device_uuid(self, device_id=0):
        return "cpu"

    def get_device_capability(self, device_id=0):
        return None

    def empty_cache(self):
        gc.collect()

    def synchronize(self):
        pass

    def is_pin_memory_available(self, device=None):
        return False

    def get_default_attention_backend(self):
        return "torch_native"

    def get_torch_distributed_backend_str(self):
        return "gloo"

    def get_compile_backend(self, mode=None):
        return "eager"

    def get_dispatch_key_name(self):
        return "native"

    def get_torch_profiler_activity_str(self):
        return "CPU"

    def get_torch_profiler_activity(self):
        return torch.profiler.ProfilerActivity.CPU
