"""Small packages in place of serving engines: the names and signatures that the plug-ins use."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

from engines import write_distribution

LAYERS = "vllm/model_executor/layers/fused_moe"
PREPARE = f"{LAYERS}/prepare_finalize"
MANAGERS = "vllm/distributed/device_communicators"
DISPATCHERS = "sglang/srt/layers/moe/token_dispatcher"

VLLM = {
    "vllm/plugins/__init__.py": """
import os
from importlib.metadata import entry_points

plugins_loaded = False

def load_general_plugins():
    global plugins_loaded
    named = os.environ.get("VLLM_PLUGINS")
    functions = []
    for one in () if plugins_loaded else entry_points(group="vllm.general_plugins"):
        if named is None or one.name in named.split(","):
            try:
                functions.append(one.load())
            except Exception as error:
                print("only logged:", error)
    plugins_loaded = True
    for function in functions:
        function()
""",
    "vllm/utils/import_utils.py": """
import importlib.util
from functools import cache

@cache
def _has_module(module_name):
    return importlib.util.find_spec(module_name) is not None

def has_deep_ep():
    return _has_module("deep_ep")

def deep_ep_v2_unavailable_reason():
    return "an old NCCL" if has_deep_ep() else "no DeepEP"

def has_deep_ep_v2():
    return deep_ep_v2_unavailable_reason() is None
""",
    f"{MANAGERS}/base_device_communicator.py": """
class Cache:
    def __init__(self):
        self._cache = {}

class All2AllManagerBase:
    def __init__(self, cpu_group):
        self.cpu_group = cpu_group
""",
    f"{MANAGERS}/all2all.py": """
import torch
from .base_device_communicator import All2AllManagerBase, Cache

class DeepEPAll2AllManagerBase(All2AllManagerBase):
    def __init__(self, cpu_group):
        super().__init__(cpu_group)
        self.handle_cache = Cache()

class DeepEPHTAll2AllManager(DeepEPAll2AllManagerBase):
    def _make_all2all_kwargs(self):
        return dict(group=self.cpu_group, num_nvl_bytes=0, num_rdma_bytes=0)

    def get_handle(self, kwargs):
        import deep_ep
        return self.handle_cache.get_or_create(self._make_all2all_kwargs(), deep_ep.Buffer)

    def set_num_sms(self, num_sms: int):
        import deep_ep
        deep_ep.Buffer.set_num_sms(num_sms)

class DeepEPLLAll2AllManager(DeepEPAll2AllManagerBase):
    _buffer = None

    def _make_all2all_kwargs(self):
        kwargs = dict(group=self.cpu_group, low_latency_mode=True)
        return kwargs

    def clean_buffers(self) -> None:
        buf = DeepEPLLAll2AllManager._buffer
        buf.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        buf.low_latency_clean_mask_buffer()

class DeepEPV2All2AllManager(All2AllManagerBase):
    def _check_gin_support(self, group) -> None: ...
""",
    f"{LAYERS}/all2all_utils.py": """
from vllm.utils.import_utils import has_deep_ep, has_deep_ep_v2

if has_deep_ep():
    from .prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from .prepare_finalize.deepep_ll import DEEPEP_QUANT_BLOCK_SHAPE, DeepEPLLPrepareAndFinalize
if has_deep_ep_v2():
    from .prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize
""",
    f"{PREPARE}/deepep_ht.py": """
import deep_ep

class DeepEPHTPrepareAndFinalize:
    def __init__(self, buffer: deep_ep.Buffer):
        self.buffer = buffer

    def prepare(self, x, topk_idx):
        return self.buffer.dispatch(x=x, topk_idx=topk_idx, expert_alignment=1)
""",
    f"{PREPARE}/deepep_ll.py": """
import deep_ep

DEEPEP_QUANT_BLOCK_SHAPE = [128, 128]

class DeepEPLLPrepareAndFinalize:
    buffer: deep_ep.Buffer

    def finalize(self, x, topk_idx, weights, handle):
        return self.buffer.low_latency_combine(x, topk_idx, weights, handle, overlap=False)
""",
    f"{PREPARE}/deepep_v2.py": """
import deep_ep

class DeepEPV2PrepareAndFinalize:
    buffer: deep_ep.ElasticBuffer
""",
}

SGLANG = {
    "sglang/kernels/ops/quantization/fp8_kernel.py": """
def sglang_per_token_group_quant_fp8(x, group_size): ...
""",
    f"{DISPATCHERS}/deepep.py": """
_deepep_import_error = None
try:
    from deep_ep import Buffer, Config
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    use_deepep = True
except Exception as exc:
    use_deepep = False
    _deepep_import_error = exc

class DeepEPBuffer:
    def get(self, group):
        buffer_kwargs = dict(low_latency_mode=True)
        return Buffer(group, 0, 0, **buffer_kwargs)
""",
    f"{DISPATCHERS}/deepep_v2.py": """
_deepep_v2_import_error = None
sglang_per_token_group_quant_fp8 = None
try:
    from deep_ep import ElasticBuffer
    use_deepep_v2 = True
except Exception as exc:
    use_deepep_v2 = False
    _deepep_v2_import_error = exc
""",
    "sglang/srt/plugins/hook_registry.py": """
import enum

class HookType(enum.Enum):
    AROUND = "around"

class HookRegistry:
    hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type=None, *, source=None):
        cls.hooks[target] = (hook, hook_type)
""",
    "sglang/srt/layers/moe/fused_moe_triton/layer.py": """
def create_moe_dispatcher(moe_runner_config, quant_method):
    return "a dispatcher"
""",
}
OF = {"vllm": ("0.33.0", VLLM), "sglang": ("0.5.23", SGLANG)}


def write(
    folder: pathlib.Path,
    engine: str,
    version: str | None = None,
    changed: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Writes an engine's package into a folder of ``sys.path``.

    Args:
        version: of its metadata; None = the one that the plug-in knows.
        changed: of files, a text that another one stands for; without a file, if that is empty.
    """
    known, files = OF[engine]
    for name, text in files.items():
        old, new = (changed or {}).get(name, ("", ""))
        if not old and name in (changed or {}):
            continue
        assert old in text, (name, old)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace(old, new) if old else text)
    write_distribution(folder, engine, version or known)


def forget() -> None:
    """Lets this process have imported no engine and no DeepEP."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("vllm", "sglang", "deep_ep", "deep_ep_cpp"):
            del sys.modules[name]
