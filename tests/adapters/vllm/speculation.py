"""A target and two drafts, trained for a minute on text that is there: the standard library's sources, byte by byte.

Random weights would speculate at random; these get two or three bytes of four right, so that a lost draft shows.
"""

from __future__ import annotations

import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCABULARY = 256
_WINDOW = 320
_SOURCES = ("argparse", "ast", "inspect", "typing", "tarfile", "zipfile", "subprocess", "pathlib", "logging/__init__")


def text() -> torch.Tensor:
    """The text, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for name in _SOURCES if (path := library / f"{name}.py").is_file()]
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.long)


def text_prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    """Pieces of the text."""
    source, chosen = text(), random.Random(seed)
    starts = [chosen.randrange(len(source) - length) for _ in range(count)]
    return [source[start : start + length].tolist() for start in starts]


def train(folder: Path, *, seconds: float = 60.0, seed: int = 0) -> None:
    """Write `target`, `draft_model` and `eagle` into `folder`."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # layers this small lose more to waiting for each other than they win
    data = text()
    target = LlamaForCausalLM(_config(hidden=128, layers=3))
    _train_language_model(target, data, seconds * 0.5, teacher=None)
    target.save_pretrained(folder / "target")
    draft = LlamaForCausalLM(_config(hidden=64, layers=1))
    _train_language_model(draft, data, seconds * 0.25, teacher=target)
    draft.save_pretrained(folder / "draft_model")
    eagle = _Eagle(target.config)
    _train_eagle(eagle, target, data, seconds * 0.25)
    eagle.write(folder / "eagle")


def _config(*, hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


class _Eagle(nn.Module):
    """EAGLE's draft: the target's hidden state and the next token's embedding, through one layer, to the next state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer: Any = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, rope: Any) -> torch.Tensor:
        mixed = self.fc(torch.cat((embedded, hidden), dim=-1))
        positions = torch.arange(mixed.shape[1])[None]
        mask = torch.full((1, 1, mixed.shape[1], mixed.shape[1]), float("-inf")).triu(1)
        output = self.layer(mixed, attention_mask=mask, position_embeddings=rope(mixed, positions))
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        config = {**self.config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        save_file({"fc.weight": self.fc.weight.data, **tensors}, folder / "model.safetensors")


def _batches(data: torch.Tensor, seconds: float, *, size: int = 8) -> Any:
    until = time.monotonic() + seconds
    step = 0
    while time.monotonic() < until:
        starts = torch.randint(0, len(data) - _WINDOW, (size,))
        yield step, torch.stack([data[start : start + _WINDOW] for start in starts])
        step += 1


def _train_language_model(
    model: LlamaForCausalLM, data: torch.Tensor, seconds: float, *, teacher: LlamaForCausalLM | None
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loss = torch.tensor(0.0)
    for step, batch in _batches(data, seconds):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        logits = model(batch).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(batch).logits[:, :-1].softmax(-1)
            loss = loss + functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"trained {sum(p.numel() for p in model.parameters())} parameters for {step} steps: loss {loss.item():.3f}")


def _train_eagle(eagle: _Eagle, target: LlamaForCausalLM, data: torch.Tensor, seconds: float) -> None:
    optimizer = torch.optim.AdamW(eagle.parameters(), lr=2e-3, weight_decay=0.01)
    loss = torch.tensor(0.0)
    rope = target.model.rotary_emb
    step = 0
    for step, batch in _batches(data, seconds):  # noqa: B007
        with torch.no_grad():
            hidden = target.model(batch).last_hidden_state
            embedded = target.model.embed_tokens(batch)
            wanted = target.lm_head(hidden).softmax(-1)
        # One step on the target's states, and one on its own, as when it runs ahead.
        first = eagle(embedded[:, 1:], hidden[:, :-1], rope)
        second = eagle(embedded[:, 2:], first[:, :-1].detach(), rope)
        loss = torch.tensor(0.0)
        for guess, states, logits in ((first, hidden[:, 1:], wanted[:, 1:]), (second, hidden[:, 2:], wanted[:, 2:])):
            loss = loss + functional.smooth_l1_loss(guess, states)
            loss = loss + functional.cross_entropy(target.lm_head(guess).flatten(0, 1), logits.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(eagle.parameters(), 1.0)
        optimizer.step()
    print(f"trained EAGLE for {step} steps: loss {loss.item():.3f}")
