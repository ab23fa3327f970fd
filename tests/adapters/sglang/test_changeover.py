"""A fleet changes over: servers with SGLang's own Mooncake linker, and with ours in layout `page`, over one store."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from softload.protocols import PageStore
from softload.stores import open_store
from softload.stores.cluster import MooncakeCluster

from .engines import PAGE, engine, prompts, tiny_llama
from .test_serve import ask, flush, launched
from .their_linker import TheirLinker, config_of

pytestmark = pytest.mark.mooncake


def keys_of(model: Path, prompt: list[int]) -> list[str]:
    """The keys under which SGLang's own linker has a prompt's pages."""
    whole = len(prompt) // PAGE * PAGE
    hashes = get_storage_hash_str(RadixKey(array("q", prompt[:whole])), None, page_size=PAGE)
    return [f"{str(model).replace('/', '-')}_{each}_tp0_cp0_pp0_k" for each in hashes]


def wait_saved(store: PageStore, keys: list[str]) -> None:
    until = time.monotonic() + 60
    while not all(store.exists(keys)):
        assert time.monotonic() < until, "the pages were not saved"
        time.sleep(0.1)


@contextmanager
def cluster_of_one() -> Iterator[tuple[MooncakeCluster, PageStore]]:
    """A master and an owner, and a client of its own that tells what is there."""
    cluster = MooncakeCluster(segment=64 << 20, lease=5, owners=1)
    cluster.start()
    try:
        store = open_store(url_of(cluster))
        store.open()
        try:
            yield cluster, store
        finally:
            store.close()
    finally:
        cluster.close()


def url_of(cluster: MooncakeCluster) -> str:
    return f"mooncake://{cluster.address}?metadata=P2PHANDSHAKE&protocol=tcp&segment=0"


def options_of(cluster: MooncakeCluster) -> dict[str, Any]:
    """Of our linker; patient."""
    return {"store": url_of(cluster), "layout": "page", "deadline": "20s", "lookup_deadline": "10s"}


WHOLE = [640, 256, 448]
"""Tokens of the prompts below that are whole pages, the last one left to be computed."""


def test_one_engine_changes_linkers(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", layers=4)
    with engine(model) as running, cluster_of_one() as (cluster, store):
        for number, first in enumerate(("theirs", "ours")):
            asked = prompts(700, 300, 450, seed=81 + number)
            answers = {}
            for who in (first, "ours" if first == "theirs" else "theirs"):
                if who == "ours":
                    running.relink(**options_of(cluster))
                else:
                    running.relink_to(TheirLinker, config_of(cluster.address))
                answers[who] = running.generate(asked)
                for prompt in asked:
                    wait_saved(store, keys_of(model, prompt))
            computed, restored = answers.values()
            assert [answer.cached_tokens for answer in computed] == [0, 0, 0]
            assert [answer.cached_tokens for answer in restored] == WHOLE
            assert [answer.tokens for answer in restored] == [answer.tokens for answer in computed]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_one_server_has_saved_the_other_restores(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", layers=4)
    with cluster_of_one() as (cluster, store):
        linkers = {
            "theirs": {
                "linker": "TheirLinker",
                "linker_module_path": "tests.adapters.sglang.their_linker",
                "linker_extra_config": config_of(cluster.address),
            },
            "ours": {
                "linker": "SoftloadLinker",
                "linker_module_path": "softload.adapters.sglang",
                "linker_extra_config": options_of(cluster),
            },
        }
        with (
            launched(model, linkers["theirs"], tmp_path / "theirs.log") as theirs,
            launched(model, linkers["ours"], tmp_path / "ours.log") as ours,
        ):
            theirs.wait_up()
            ours.wait_up()
            for source, target, seed in ((theirs, ours, 71), (ours, theirs, 72)):
                asked = prompts(700, 300, 450, seed=seed)
                cold = [ask(source.address, prompt) for prompt in asked]
                for prompt in asked:
                    wait_saved(store, keys_of(model, prompt))
                flush(target.address)
                restored = [ask(target.address, prompt) for prompt in asked]
                assert {status for status, _, _ in cold + restored} == {200}
                assert [tokens for _, tokens, _ in restored] == [tokens for _, tokens, _ in cold]
                assert [cached for _, _, cached in cold] == [0, 0, 0]
                assert [cached for _, _, cached in restored] == WHOLE
