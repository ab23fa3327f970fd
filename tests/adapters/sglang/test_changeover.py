"""A fleet changes over: servers with SGLang's own Mooncake linker, and with ours in layout `page`, over one store."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from softload.protocols import PageStore
from softload.stores import open_store
from softload.stores.cluster import MooncakeCluster

from .engines import PAGE, prompts, tiny_llama
from .test_serve import ask, flush, launched
from .their_linker import config_of

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]


def keys_of(model: Path, prompt: list[int]) -> list[str]:
    """The keys under which SGLang's own linker has a prompt's pages."""
    whole = len(prompt) // PAGE * PAGE
    hashes = get_storage_hash_str(RadixKey(array("q", prompt[:whole])), None, page_size=PAGE)
    return [f"{str(model).replace('/', '-')}_{each}_tp0_cp0_pp0_k" for each in hashes]


def wait_saved(store: PageStore, keys: list[str]) -> None:
    until = time.monotonic() + 20
    while not all(store.exists(keys)):
        assert time.monotonic() < until, "the pages were not saved"
        time.sleep(0.1)


@pytest.mark.timeout(400)
def test_what_one_server_has_saved_the_other_restores(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", layers=4)
    cluster = MooncakeCluster(segment=64 << 20, lease=5, owners=1)
    cluster.start()
    try:
        url = f"mooncake://{cluster.address}?metadata=P2PHANDSHAKE&protocol=tcp&segment=0"
        options = {"store": url, "layout": "page", "deadline": "20s", "lookup_deadline": "10s"}
        linkers = {
            "theirs": {
                "linker": "TheirLinker",
                "linker_module_path": "tests.adapters.sglang.their_linker",
                "linker_extra_config": config_of(cluster.address),
            },
            "ours": {
                "linker": "SoftloadLinker",
                "linker_module_path": "softload.adapters.sglang",
                "linker_extra_config": options,
            },
        }
        store = open_store(url)
        store.open()
        try:
            with (
                launched(model, linkers["theirs"], tmp_path / "theirs.log") as theirs,
                launched(model, linkers["ours"], tmp_path / "ours.log") as ours,
            ):
                theirs.wait_up()
                ours.wait_up()
                pairs = (theirs.address, ours.address, 71), (ours.address, theirs.address, 72)
                for source, target, seed in pairs:
                    asked = prompts(700, 300, 450, seed=seed)
                    cold = [ask(source, prompt) for prompt in asked]
                    for prompt in asked:
                        wait_saved(store, keys_of(model, prompt))
                    flush(target)
                    restored = [ask(target, prompt) for prompt in asked]
                    assert {status for status, _, _ in cold + restored} == {200}
                    assert [tokens for _, tokens, _ in restored] == [tokens for _, tokens, _ in cold]
                    assert [cached for _, _, cached in cold] == [0] * len(asked)
                    assert [cached for _, _, cached in restored] == [(len(each) - 1) // PAGE * PAGE for each in asked]
        finally:
            store.close()
    finally:
        cluster.close()
