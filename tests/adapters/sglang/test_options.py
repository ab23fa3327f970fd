"""Settings are checked when the engine starts; an engine that cannot be hooked gets `sync`, or an error."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from softload import Layout
from softload.adapters.sglang import Admission, LinkerOptions, SoftloadLinker, hooking
from softload.adapters.sglang.engine import _unsupported as unsupported
from softload.adapters.sglang.engine import check_engine
from softload.adapters.sglang.plugin import register

from .trees import KINDS, Tree, tree_of


def test_text_is_parsed() -> None:
    options = LinkerOptions.parse(
        {"store": "memory://", "deadline": "1500ms", "landing_bytes": "64MiB", "layout": "page", "admission": "stream"}
    )
    assert (options.deadline, options.landing_bytes) == (1.5, 64 << 20)
    assert (options.layout, options.admission) == (Layout.PAGE, Admission.STREAM)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "store: expected a URL like mooncake://host:port, got None"),
        ({"store": "memory://", "deadlines": 1}, "expected keys out of .*, got deadlines"),
        ({"store": "http://x"}, "expected a URL like memory://"),
        ({"store": "memory://", "admission": "later"}, "admission: expected one of hold, stream, sync, got 'later'"),
        ({"store": "memory://", "deadline": -1}, "deadline: expected 0 or more seconds, got -1"),
        ({"store": "memory://", "deadline": "soon"}, "deadline: "),
        ({"store": "memory://", "max_holds": 0}, "max_holds: expected a positive whole number, got 0"),
        ({"store": "memory://", "save": "yes"}, "save: expected true or false, got 'yes'"),
        ({"store": "memory://", "namespace": 5}, "namespace: expected a string, got 5"),
        ({"store": "memory://", "layout": "rows"}, "layout: expected one of grouped, page, got 'rows'"),
    ],
)
def test_what_is_wrong_is_said(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LinkerOptions.parse(extra)


def test_the_documented_options_are_those_there_are() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "sglang.md").read_text()
    table = page.split("## Options", 1)[1].split("##", 1)[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in re.findall("`(.*?)`", row)]
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(LinkerOptions))


def test_hold_is_the_default() -> None:
    with tree_of(KINDS["mha"]) as tree:
        assert tree.linker.admission is Admission.HOLD


def test_a_changed_target_means_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def pause_generation(self: Any, request: Any) -> None:
        """Another function than the one that was hooked."""

    monkeypatch.setattr(Scheduler, "pause_generation", pause_generation)
    assert "Scheduler.pause_generation" in (hooking.missing() or "")
    for asked in ({}, {"admission": "hold"}):
        with tree_of(KINDS["mha"], asked) as tree:
            assert tree.linker.admission is Admission.SYNC


TARGETS = {target.rsplit(".", 2)[1] + "." + target.rsplit(".", 2)[2]: target for target in hooking._TARGETS}


def owner_of(target: str) -> tuple[Any, str]:
    """The class and the name of a function that is hooked."""
    path, _, name = target.rpartition(".")
    return pkgutil.resolve_name(path), name


def restores(tree: Tree) -> bool:
    """Whether pages come back from the store."""
    asked = list(range(1000, 1000 + 3 * tree.page_size))
    written = tree.compute(asked)
    tree.settle()
    tree.evict_all()
    req = tree.request([*asked, 7])
    assert tree.match(req) == len(asked)
    slots = tree.load_back(req)
    assert slots is not None
    tree.forward(3)
    got = tree.restored(req, slots)
    assert tree.cache.finish_external_linker_loads([req]) == []
    assert req.discard_output_reason is None
    return all(torch.equal(got[name], written[name]) for name in written)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_one_hook_that_is_missing_means_sync_and_is_named(
    target: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever it is, the others do no harm, and pages are restored."""
    owner, name = owner_of(target)
    monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    with tree_of(KINDS["mha"]) as tree:
        assert tree.linker.admission is Admission.SYNC
        assert restores(tree)
    said = [line for line in capfd.readouterr().out.splitlines() if "linker.sync_only" in line]
    assert len(said) == 1 and f"no hook around {target}" in said[0]


@pytest.mark.parametrize("change", ["gone", "other parameters"])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_target_that_another_sglang_has_changed_leaves_all_unhooked(
    target: str, change: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    owner, name = owner_of(target)
    if change == "gone":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda self, something: None)
    monkeypatch.setattr(hooking, "_installed", {})
    monkeypatch.setattr(hooking, "_reason", None)
    registered: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *args: registered.append(target))
    register()
    assert not registered
    reason = hooking.missing() or ""
    assert target in reason and ("is not there" if change == "gone" else "got self, something") in reason
    assert target in capfd.readouterr().out


def test_without_any_hook_pages_are_restored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in (
        (UnifiedCacheLinkerWrapper, ("match", "finish_loads", "release_request")),
        (UnifiedRadixCache, ("finish_external_linker_loads",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    with tree_of(KINDS["mha"]) as tree:
        assert tree.linker.admission is Admission.SYNC
        assert restores(tree)


def test_another_version_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooking, "TESTED_VERSIONS", ("0.5.22",))
    assert hooking._changed() == "SGLang 0.5.23, expected 0.5.22"


def test_an_engine_that_was_not_tried_needs_sync_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softload.adapters.sglang.engine._unsupported", lambda: ["attention data parallelism"])
    with tree_of(KINDS["mha"]) as tree:
        assert tree.linker.admission is Admission.SYNC
    with (
        pytest.raises(ValueError, match="'hold' was not tried with attention data parallelism"),
        tree_of(KINDS["mha"], {"admission": "hold"}),
    ):
        pass


@pytest.mark.parametrize(
    ("getter", "answer", "said"),
    [
        ("get_parallel", SimpleNamespace(attn_dp_size=2), "attention data parallelism (attn_dp_size 2)"),
        (
            "get_disagg",
            SimpleNamespace(disaggregation_mode="decode"),
            "prefill-decode disaggregation (disaggregation_mode decode)",
        ),
        (
            "get_exec",
            SimpleNamespace(dllm=SimpleNamespace(dllm_algorithm="LowConfidence")),
            "diffusion language models (dllm_algorithm LowConfidence)",
        ),
    ],
)
def test_what_was_not_tried_is_named(getter: str, answer: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported() == []
    monkeypatch.setattr(f"softload.adapters.sglang.engine.{getter}", lambda: answer)
    assert unsupported() == [said]


def test_the_documented_launch_line_is_one() -> None:
    """SGLang's own parser takes it, finds our class by it, and the class takes its settings."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "sglang.md").read_text()
    line = page.split("$ python -m sglang.launch_server ", 1)[1].split("```", 1)[0].replace("\\\n", " ")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    got = parser.parse_args(shlex.split(line))
    assert got.enable_unified_cache_external_linker and got.unified_cache_external_linker_backend == "dynamic"
    config = got.unified_cache_external_linker_config
    config = UnifiedCacheLinkerConfig.from_dict(json.loads(config) if isinstance(config, str) else config)
    assert getattr(importlib.import_module(config.linker_module_path), config.linker) is SoftloadLinker
    assert LinkerOptions.parse(config.linker_extra_config).store.startswith("mooncake://")


def test_stages_of_a_pipeline_are_refused() -> None:
    with pytest.raises(ValueError, match="pp_size: expected 1, got 2"):
        check_engine(SimpleNamespace(pp_size=2))
