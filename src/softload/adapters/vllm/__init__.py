"""vLLM: `SoftloadConnector`, a KV connector for `--kv-transfer-config`. Needs vLLM; see docs/vllm.md."""

from softload.adapters.vllm.connector import SoftloadConnector
from softload.adapters.vllm.options import ConnectorOptions, LoadMode

__all__ = ["ConnectorOptions", "LoadMode", "SoftloadConnector"]
