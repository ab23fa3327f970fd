"""What the connector refuses when the engine starts, what it says of itself, and what its page of the docs says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, assert_equal, core, engine, generate, prompts, tiny_llama
from launch_line import table, transfer_config
from rigs import rig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma

from softload.adapters.vllm import SoftloadConnector
from softload.adapters.vllm.options import ConnectorOptions
from softload.adapters.vllm.stats import METRICS
from softload.errors import StoreSetupError
from softload.stores import WrapperStore


class Unreachable(WrapperStore):
    def open(self) -> None:
        raise StoreSetupError("nobody answers")


# These first: an engine of their own each, and one at a time.
def test_a_store_that_cannot_be_set_up_costs_the_cache(tmp_path: Path) -> None:
    with engine(tiny_llama(tmp_path), wrap=Unreachable) as llm:
        asked = prompts(200, 330)
        answers = generate(llm, asked)
        assert llm.reset_prefix_cache()
        again = generate(llm, asked)
        assert not any(answer.cached_tokens for answer in again)
        assert_equal(answers, again)


def test_a_store_that_is_required_and_cannot_be_set_up_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    with pytest.raises(StoreSetupError, match="nobody answers"):
        with engine(tiny_llama(tmp_path), wrap=Unreachable, extra={"require_store": True}):
            pass


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SoftloadConnector]:
    """A running engine's connector, for its descriptions of that engine."""
    with rig(tmp_path_factory.mktemp("llama"), async_scheduling=False) as made:
        yield core(made.llm).scheduler.connector


def start(running: SoftloadConnector, *, groups: int = 1, **changes: Any) -> SoftloadConnector:
    """A connector for the same engine with other settings, `section__name`, and so many KV cache groups."""
    config, cache = copy.copy(running._vllm_config), copy.copy(running._kv_cache_config)
    for name, value in changes.items():
        section, setting = name.split("__")
        changed = copy.copy(getattr(config, section))
        object.__setattr__(changed, setting, value)
        object.__setattr__(config, section, changed)
    cache.kv_cache_groups = list(cache.kv_cache_groups) * groups
    return SoftloadConnector(config, KVConnectorRole.SCHEDULER, cache)


def extra(**settings: Any) -> dict[str, Any]:
    return {"store": "memory://", **settings}


def test_a_cache_that_may_lose_what_it_saves(running: SoftloadConnector) -> None:
    made = start(running)
    assert made.requires_kv_delivery is False
    assert supports_hma(made)
    assert not SoftloadConnector.supports_sleep_mode(made._kv_transfer_config)
    assert SoftloadConnector.requires_piecewise_for_cudagraph(extra(mode="layerwise"))
    assert not SoftloadConnector.requires_piecewise_for_cudagraph(extra())


def test_a_policy_that_ends_requests_is_refused_unless_it_is_wanted(running: SoftloadConnector) -> None:
    with pytest.raises(ValueError, match="kv_load_failure_policy: expected 'recompute', got 'fail'"):
        start(running, kv_transfer_config__kv_load_failure_policy="fail")
    allowed = KVTransferConfig(
        kv_connector="SoftloadConnector",
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config=extra(allow_fail_policy=True),
    )
    config = copy.copy(running._vllm_config)
    object.__setattr__(config, "kv_transfer_config", allowed)
    SoftloadConnector(config, KVConnectorRole.SCHEDULER, running._kv_cache_config)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stores": "memory://"}, "expected keys out of store, .*, got stores"),
        ({"store": None}, "store: expected a URL"),
        ({"store": "redis://10.0.0.7"}, "redis"),
        ({"mode": "eager"}, "mode: expected one of prefetch, async, layerwise, got 'eager'"),
        ({"layout": "rows"}, "layout: expected one of"),
        ({"integrity": "crc"}, "integrity: expected one of"),
        ({"draft_policy": "keep"}, "draft_policy: expected one of"),
        ({"deadline": "soon"}, "deadline: "),
        ({"deadline": -1}, "deadline: expected 0 or more seconds, got -1"),
        ({"landing_bytes": "much"}, "landing_bytes: "),
        ({"read_lanes": 0}, "read_lanes: expected a positive whole number, got 0"),
        ({"save": "yes"}, "save: expected true or false, got 'yes'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(running: SoftloadConnector, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        start(running, kv_transfer_config__kv_connector_extra_config=extra(**settings))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_role: expected 'kv_both', got 'kv_producer'"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size: expected 1, got 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size: expected 1, got 2"),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"groups": 2}, "--disable-hybrid-kv-cache-manager"),
    ],
    ids=["role", "decode context", "prefill context", "sleep", "groups"],
)
def test_engines_that_are_refused(running: SoftloadConnector, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        start(running, **changes)


def test_hashes_that_differ_from_process_to_process_are_refused(
    running: SoftloadConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        start(running, cache_config__prefix_caching_hash_algo="xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    start(running, cache_config__prefix_caching_hash_algo="xxhash")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scheduler_config__async_scheduling": True}, "--no-async-scheduling"),
        ({"parallel_config__pipeline_parallel_size": 2}, "needs pipeline_parallel_size 1, got 2"),
        ({"groups": 2}, "needs one KV cache group, got 2"),
    ],
    ids=["async scheduling", "stages", "groups"],
)
def test_engines_in_which_the_forward_may_not_wait(
    running: SoftloadConnector, changes: dict[str, Any], told: str
) -> None:
    layerwise: dict[str, Any] = {"kv_transfer_config__kv_connector_extra_config": extra(mode="layerwise")}
    with pytest.raises(ValueError, match=told):
        start(running, **layerwise, **changes)
    start(running, **layerwise)


def test_groups_of_different_block_sizes_are_refused(running: SoftloadConnector) -> None:
    cache = copy.copy(running._kv_cache_config)
    cache.hash_block_size = BLOCK // 2
    with pytest.raises(ValueError, match="expected one block size"):
        SoftloadConnector(running._vllm_config, KVConnectorRole.SCHEDULER, cache)


def test_the_launch_line_is_understood() -> None:
    config = transfer_config()
    assert config["kv_connector_module_path"] == SoftloadConnector.__module__.rsplit(".", 1)[0]
    assert config["kv_connector"] == SoftloadConnector.__name__
    assert KVTransferConfig(**config).kv_load_failure_policy == "recompute"
    ConnectorOptions.parse(config["kv_connector_extra_config"])


def test_the_page_has_every_option_and_its_default() -> None:
    told = table("Options")
    assert set(told) == {option.name for option in fields(ConnectorOptions)}
    defaults = ConnectorOptions.parse(extra())
    for name in set(told) - {"store", "namespace", "landing_bytes", "stuck_threads", "read_lanes", "write_lanes"}:
        value = getattr(defaults, name)
        default = f"{value:g}" if isinstance(value, float) else str(value).lower()
        assert told[name].strip("`") == default, name


def test_the_page_has_every_metric() -> None:
    assert set(table("Metrics")) == {f"vllm:softload_{name}_total" for name in METRICS}
