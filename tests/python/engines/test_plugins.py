"""The plug-ins change what they should, and refuse the rest: on packages with the same names."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import _crossdock_engines
import crossdock.sglang
import crossdock.vllm
import stand_ins
from crossdock import _core, deep_ep
from crossdock.deep_ep import Buffer
from engines import installed as crossdock_in
from stand_ins import DISPATCHERS, LAYERS, MANAGERS, PREPARE
from support import Rank, on_ranks
from torch_ranks import process_group

PLUGINS = {"vllm": crossdock.vllm, "sglang": crossdock.sglang}
ALLOWED = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
ENTRIES = {"vllm": _crossdock_engines.vllm, "sglang": _crossdock_engines.sglang}
VARIABLES = ("XD_ENGINE", "XD_TIMEOUT_MS", "EP_DISABLE_GIN", *ALLOWED.values())

Installed = Callable[..., types.ModuleType]


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Installs an engine for this test, and gives its plug-in."""

    def install(engine: str, *arguments: Any) -> types.ModuleType:
        stand_ins.write(tmp_path, engine, *arguments)
        importlib.invalidate_caches()
        return PLUGINS[engine]

    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # Where this suite's folders are packages without code, of which one is named deep_ep.
    suite = str(pathlib.Path(__file__).parents[1])
    others = [path for path in sys.path if path != suite]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    monkeypatch.setattr(_core, "built_with_cuda", True)
    before = Buffer.num_sms
    stand_ins.forget()
    yield install
    stand_ins.forget()
    Buffer.num_sms = before


def of(file: str) -> Any:
    """The module of a file of an engine."""
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def nothing_has_changed() -> bool:
    """Whether no DeepEP can be found here, and no variable says anything."""
    names = [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]
    return not names and {"EP_DISABLE_GIN", "XD_TIMEOUT_MS"}.isdisjoint(os.environ)


@pytest.mark.parametrize("engine", PLUGINS)
@pytest.mark.parametrize("switch, allowed", [(None, None), (None, "a,b"), ("0", "crossdock")])
def test_a_plug_in_does_nothing_unless_it_is_wanted(
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    switch: str | None,
    allowed: str | None,
) -> None:
    installed(engine, "7.7")
    for name, value in (("XD_ENGINE", switch), (ALLOWED[engine], allowed)):
        if value is not None:
            monkeypatch.setenv(name, value)
    ENTRIES[engine]()
    assert nothing_has_changed() and engine not in sys.modules
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.parametrize("engine", PLUGINS)
def test_a_crossdock_that_was_built_without_cuda_is_refused_where_torch_has_it(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    plugin = installed(engine)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_core, "built_with_cuda", False)
    with pytest.raises(ImportError, match="this Crossdock was built without CUDA; see docs/insta"):
        plugin.register_deep_ep()
    assert nothing_has_changed()
    monkeypatch.setattr(torch.version, "cuda", None)  # for the CPU it will do
    plugin.register_deep_ep()
    assert sys.modules["deep_ep"] is deep_ep


@pytest.mark.parametrize("engine", PLUGINS)
@pytest.mark.parametrize("given, used", [(None, "60000"), ("", "60000"), ("5", "5")])
def test_waits_end_before_an_engine_gives_up(
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    given: str | None,
    used: str,
) -> None:
    if given is not None:
        monkeypatch.setenv("XD_TIMEOUT_MS", given)
    installed(engine).register_deep_ep()
    assert os.environ["XD_TIMEOUT_MS"] == used


def loaded_by_vllm(folder: pathlib.Path) -> Callable[[], None]:
    """vLLM's function that loads plug-ins, where Crossdock's is installed and not yet imported."""
    sys.path.insert(0, crossdock_in(folder, "vllm.general_plugins"))
    importlib.invalidate_caches()
    load: Callable[[], None] = importlib.import_module("vllm.plugins").load_general_plugins
    return load


def test_vllm_takes_names_of_plug_ins_without_blanks(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    installed("vllm")
    monkeypatch.setenv("XD_ENGINE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "other, crossdock")
    loaded_by_vllm(tmp_path)()
    assert nothing_has_changed()


def test_vllm_meets_a_refusal_each_time(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    installed("vllm", "9.1", {f"{PREPARE}/deepep_v2.py": ("", "")})
    load = loaded_by_vllm(tmp_path)
    monkeypatch.setenv("XD_ENGINE", "deep_ep")
    for _ in range(2):
        with pytest.raises(ImportError, match="there is no vllm/model_executor"):
            load()
    monkeypatch.setenv("XD_ENGINE", "0")
    load()


def test_vllm_is_as_it_was_if_a_module_of_it_cannot_be_imported(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = installed("vllm", None, {f"{PREPARE}/deepep_v2.py": ("import deep_ep", "import no_x")})
    imports, managers = of("vllm/utils/import_utils.py"), of(f"{MANAGERS}/all2all.py")
    of(f"{LAYERS}/all2all_utils.py")
    classes = managers.DeepEPHTAll2AllManager, managers.DeepEPLLAll2AllManager
    before = dict(vars(imports)), [dict(vars(one)) for one in classes]
    for _ in range(2):
        with pytest.raises(ImportError, match="no_x"):
            plugin.register_deep_ep()
    assert (dict(vars(imports)), [dict(vars(one)) for one in classes]) == before
    assert "EP_DISABLE_GIN" not in os.environ


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a Crossdock that cannot be imported."""
    for name in ("crossdock", *(f"crossdock.{engine}" for engine in PLUGINS)):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "_crossdock_engines")


def test_vllm_ends_if_crossdock_cannot_be_imported(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, broken: None
) -> None:
    installed("vllm")
    load = loaded_by_vllm(tmp_path)
    monkeypatch.setenv("XD_ENGINE", "1")
    for _ in range(2):
        with pytest.raises(ImportError, match="crossdock"):
            load()


def test_sglang_makes_no_dispatcher_if_crossdock_cannot_be_imported(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, broken: None
) -> None:
    installed("sglang")
    monkeypatch.setenv("XD_ENGINE", "1")
    with pytest.raises(ImportError):
        importlib.import_module("_crossdock_engines").sglang()
    [(hook, _)] = of("sglang/srt/plugins/hook_registry.py").HookRegistry.hooks.values()
    with pytest.raises(RuntimeError, match="^crossdock.sglang: .*import of crossdock"):
        hook(None, "a config", quant_method=None)


def test_vllm_finds_deep_ep_here(
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
) -> None:
    installed("vllm")
    imports, chooser = of("vllm/utils/import_utils.py"), of(f"{LAYERS}/all2all_utils.py")
    assert not imports.has_deep_ep() and not hasattr(chooser, "DeepEPHTPrepareAndFinalize")
    monkeypatch.setenv("VLLM_PLUGINS", "other,crossdock")
    monkeypatch.setenv("XD_ENGINE", "deep_ep")
    loaded_by_vllm(tmp_path)()
    ENTRIES["vllm"]()
    assert imports.has_deep_ep() and imports.has_deep_ep_v2()
    assert sys.modules["deep_ep"] is deep_ep and os.environ["EP_DISABLE_GIN"] == "1"
    for name, module in (("HT", "ht"), ("LL", "ll"), ("V2", "v2")):
        name = f"DeepEP{name}PrepareAndFinalize"
        assert getattr(chooser, name) is getattr(of(f"{PREPARE}/deepep_{module}.py"), name)
    assert chooser.DEEPEP_QUANT_BLOCK_SHAPE == [128, 128]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith(
        " is DeepEP for deepep_high_throughput, deepep_low_latency and deepep_v2 "
        "(vLLM 0.33.0, tested)\n"
    )
    manager = of(f"{MANAGERS}/all2all.py").DeepEPHTAll2AllManager(None)
    for given, used in ((20, 20), (7, 6), (1, 2), (0, 0)):
        manager.set_num_sms(given)
        assert Buffer.num_sms == used


def test_vllm_gets_its_names_later_if_it_has_not_looked(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = installed("vllm", "0.34.5")
    plugin.register_deep_ep()
    assert of(f"{LAYERS}/all2all_utils.py").DeepEPV2PrepareAndFinalize
    assert "(vLLM 0.34.5, tested: 0.33.0)" in capsys.readouterr().err


@pytest.mark.parametrize("switch, allowed", [("1", None), (None, "crossdock")])
def test_vllm_meets_a_refusal_of_our_classes_in_words(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, switch: str | None, allowed: str | None
) -> None:
    """On a package that has what the other way needs, and not all that this one does."""
    installed("vllm", "9.1")
    for name, value in (("XD_ENGINE", switch), ("VLLM_PLUGINS", allowed)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ImportError) as caught:
        ENTRIES["vllm"]()
    says = str(caught.value)
    assert says.startswith("crossdock.vllm knows vLLM 0.33.0, and found 9.1, in which there is no ")
    assert f"there is no {LAYERS}/modular_kernel.py" in says
    assert "base_device_communicator.py has no All2AllManagerBase.query_fault" in says
    assert (
        "DeepEPHTPrepareAndFinalize.__init__ has the parameters (self, buffer) in place of" in says
    )
    assert "Use XD_ENGINE=deep_ep" in says
    assert nothing_has_changed() and "vllm.utils" not in sys.modules


CHANGES = {
    "a name": (
        "vllm",
        "vllm/utils/import_utils.py",
        ("has_deep_ep_v2", "has_deepep2"),
        "vllm/utils/import_utils.py has no has_deep_ep_v2",
    ),
    "an attribute": (
        "vllm",
        f"{MANAGERS}/all2all.py",
        ("self.handle_cache", "self.handles"),
        "all2all.py has no DeepEPAll2AllManagerBase.handle_cache",
    ),
    "parameters": (
        "vllm",
        f"{MANAGERS}/all2all.py",
        ("num_sms: int", "count, *, now"),
        "DeepEPHTAll2AllManager.set_num_sms has the parameters (self, count, now) in place of "
        "(self, num_sms)",
    ),
    "a file": (
        "vllm",
        f"{PREPARE}/deepep_v2.py",
        ("", ""),
        "there is no vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py",
    ),
    "an argument of DeepEP": (
        "vllm",
        f"{PREPARE}/deepep_ht.py",
        ("expert_alignment=1", "expert_alignment=1, zeal=2"),
        "gives Buffer.dispatch the argument zeal, which it does not take",
    ),
    "a method of DeepEP": (
        "vllm",
        f"{MANAGERS}/all2all.py",
        ("buf.low_latency_clean_mask_buffer", "buf.low_latency_clean_all"),
        "calls Buffer.low_latency_clean_all, which crossdock.deep_ep does not have",
    ),
    "a dispatcher's name": (
        "sglang",
        f"{DISPATCHERS}/deepep_v2.py",
        ("use_deepep_v2", "has_v2"),
        "sglang/srt/layers/moe/token_dispatcher/deepep_v2.py has no use_deepep_v2",
    ),
    "an argument of a constructor": (
        "sglang",
        f"{DISPATCHERS}/deepep.py",
        ("low_latency_mode", "mode"),
        "gives Buffer the argument mode, which it does not take",
    ),
    "an argument that a function makes": (
        "vllm",
        f"{MANAGERS}/all2all.py",
        ("num_nvl_bytes", "num_nvl"),
        "gives Buffer the argument num_nvl, which it does not take",
    ),
    "an argument of a dict with a name": (
        "vllm",
        f"{MANAGERS}/all2all.py",
        ("low_latency_mode", "mode"),
        "gives Buffer the argument mode, which it does not take",
    ),
    "arguments by place": (
        "vllm",
        f"{PREPARE}/deepep_ht.py",
        ("x=x, topk_idx=topk_idx", ", ".join("abcdefghijklmno")),
        "gives Buffer.dispatch 15 positional arguments, of which it takes 14",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_engine_is_refused_in_words_and_stays_as_it_is(
    installed: Installed, change: str
) -> None:
    engine, file, texts, says = CHANGES[change]
    plugin = installed(engine, "9.1", {file: texts})
    with pytest.raises(ImportError) as caught:
        plugin.register_deep_ep()
    known = plugin.ENGINE.tested[0]
    begins = f"crossdock.{engine} knows {plugin.ENGINE.title} {known}, and found 9.1, in which "
    assert str(caught.value).startswith(begins) and says in str(caught.value)
    assert plugin.ENGINE.instead in str(caught.value)
    assert nothing_has_changed()


def test_a_method_that_takes_all_keywords_takes_unknown_ones(installed: Installed) -> None:
    class Buffer(deep_ep.Buffer):
        def dispatch(self, **options: Any) -> Any: ...

    changed = {f"{PREPARE}/deepep_ht.py": ("expert_alignment=1", "zeal=2")}
    installed("vllm", None, changed).ENGINE.require(Buffer)


def test_a_deep_ep_that_was_imported_before_is_refused(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = installed("vllm")
    sys.modules["deep_ep"] = other = types.ModuleType("deep_ep")
    monkeypatch.setenv("XD_ENGINE", "1")
    imports = of("vllm/utils/import_utils.py")
    before = dict(vars(imports))
    with pytest.raises(ImportError, match="expected that no other deep_ep has been imported"):
        plugin.register_deep_ep()
    assert sys.modules["deep_ep"] is other and "EP_DISABLE_GIN" not in os.environ
    assert vars(imports) == before


@pytest.mark.parametrize("brought", [True, False])
def test_dispatchers_of_sglang_that_are_imported_take_this_deep_ep(
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    brought: bool,
) -> None:
    plugin = installed("sglang")
    if brought:  # with SGLang, which a scheduler imports in front of its plug-ins
        sys.modules["deep_ep"] = other = types.ModuleType("deep_ep")
        vars(other).update(Buffer=object, Config=object, ElasticBuffer=object)
    first, second = of(f"{DISPATCHERS}/deepep.py"), of(f"{DISPATCHERS}/deepep_v2.py")
    assert first.use_deepep is second.use_deepep_v2 is brought
    monkeypatch.setenv("SGLANG_PLUGINS", "other, crossdock")
    monkeypatch.setenv("XD_ENGINE", "deep_ep")
    ENTRIES["sglang"]()
    plugin.register_deep_ep()
    assert first.use_deepep and first.Buffer is Buffer and first.Config is deep_ep.Config
    assert second.use_deepep_v2 and second.ElasticBuffer is deep_ep.ElasticBuffer
    quantise = of("sglang/kernels/ops/quantization/fp8_kernel.py").sglang_per_token_group_quant_fp8
    assert first.sglang_per_token_group_quant_fp8 is quantise
    assert second.sglang_per_token_group_quant_fp8 is quantise
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith(
        " is DeepEP for --moe-a2a-backend deepep and deepep_v2 (SGLang 0.5.23, tested)\n"
    )


def test_dispatchers_of_sglang_that_are_imported_later_find_this_deep_ep(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = installed("sglang")
    monkeypatch.setenv("XD_ENGINE", "1")
    plugin.register_deep_ep()
    plugin.register_deep_ep()
    assert of(f"{DISPATCHERS}/deepep.py").Buffer is Buffer
    assert of(f"{DISPATCHERS}/deepep_v2.py").ElasticBuffer is deep_ep.ElasticBuffer
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("switch", ["1", "yes"])
def test_sglang_which_swallows_an_error_meets_it_again(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    installed("sglang", "9.1", {f"{DISPATCHERS}/deepep.py": ("", "")})
    monkeypatch.setenv("XD_ENGINE", switch)
    says = {
        "1": "there is no sglang/srt/layers",
        "yes": "XD_ENGINE: expected 0, 1 or deep_ep, got 'yes'",
    }
    with pytest.raises((ImportError, ValueError), match=says[switch]):
        ENTRIES["sglang"]()
    registry = of("sglang/srt/plugins/hook_registry.py")
    [(target, (hook, kind))] = registry.HookRegistry.hooks.items()
    module, _, name = target.rpartition(".")
    assert kind is registry.HookType.AROUND
    with pytest.raises(RuntimeError, match=f"^crossdock.sglang: .*{says[switch]}"):
        hook(getattr(importlib.import_module(module), name), "a config", quant_method=None)


def test_an_sglang_without_these_hooks_ends(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {
        f"{DISPATCHERS}/deepep.py": ("", ""),
        "sglang/srt/plugins/hook_registry.py": ("register", "enlist"),
    }
    installed("sglang", "9.1", missing)
    monkeypatch.setenv("XD_ENGINE", "1")
    with pytest.raises(SystemExit, match="deepep.py.*'HookRegistry' has no attribute 'register'"):
        ENTRIES["sglang"]()
    assert nothing_has_changed()


@on_ranks(2, among=2)
def test_ranks_are_in_step_when_vllm_has_cleaned_its_buffers(me: Rank, tmp_path: Any) -> None:
    if me.rank == 0:
        stand_ins.write(tmp_path, "vllm")
    with process_group():
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            patch.setenv("XD_TIMEOUT_MS", "600000")
            patch.setenv("EP_DISABLE_GIN", "0")
            patch.setattr(_core, "built_with_cuda", True)
            try:
                crossdock.vllm.register_deep_ep()
                managers = of(f"{MANAGERS}/all2all.py").DeepEPLLAll2AllManager
                check_recovery(me, managers)
                patch.setattr(_core, "default_timeout_ms", lambda: 500)
                check_absence(me, managers)
            finally:
                stand_ins.forget()


def check_recovery(me: Rank, managers: Any) -> None:
    """The others have masked the last rank, which misses their steps; then all clean buffers."""
    experts, most, last = me.num_ranks, 4, me.num_ranks - 1
    ids = torch.arange(experts).unsqueeze(1)  # a token for each expert
    manager = managers(dist.group.WORLD)
    buffers = [
        Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
        for _ in range(2)
    ]
    manager.handle_cache._cache.update(enumerate(buffers))
    managers._buffer = buffers[-1]

    def step(buffer: Buffer, hidden: int) -> list[int]:
        x = torch.full((experts, hidden), 1.0 + me.rank, dtype=torch.bfloat16)
        rows, count, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, most, experts, use_fp8=False
        )
        weights = torch.ones(experts, 1)
        out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        assert count.tolist() == [sum(masks_of(buffer))]
        return (out[:, 0] / (1 + me.rank)).int().tolist()

    def masks_of(buffer: Buffer) -> list[int]:
        status = torch.zeros(me.num_ranks, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        return (1 - status).tolist()

    for buffer in buffers:
        for hidden in (32, 64):
            assert step(buffer, hidden) == [1] * me.num_ranks
    dist.barrier()
    for buffer in buffers:
        if me.rank != last:
            buffer.low_latency_update_mask_buffer(last, True)
            for hidden in (32, 64, 64):
                assert step(buffer, hidden) == [1] * last + [0]
    if me.rank == 0:
        time.sleep(0.2)  # behind a peer that would wait for it at once
    manager.clean_buffers()
    for buffer in buffers:
        assert masks_of(buffer) == [1] * me.num_ranks
        for hidden in (32, 64, 64):
            assert step(buffer, hidden) == [1] * me.num_ranks
        dist.barrier()
        buffer.destroy()


def check_absence(me: Rank, managers: Any) -> None:
    """The last rank does not come to clean its buffers, of which an error tells."""
    manager, last = managers(dist.new_group()), me.num_ranks - 1
    managers._buffer = buffer = Buffer(
        dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True
    )
    if me.rank == 0:
        with pytest.raises(RuntimeError, match=rf"Ranks {last} failed to pass monitoredBarrier"):
            manager.clean_buffers()
    dist.barrier()
    buffer.destroy()
