"""A target and two drafts, trained for a minute on text that is there: passages of the standard library's sources.

Random weights would speculate at random. These learn passages that come back after `PASSAGE` bytes, so that a draft
which has lost its KV of the prompt guesses worse, which shows.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

PASSAGE = 64
VOCABULARY = 256
_WINDOW = 4 * PASSAGE
_SOURCES = ("argparse", "ast", "inspect", "typing", "tarfile", "zipfile", "subprocess", "pathlib", "logging/__init__")


def text() -> torch.Tensor:
    """The text, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for name in _SOURCES if (path := library / f"{name}.py").is_file()]
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.long)


def passages(count: int, length: int, *, seed: int) -> list[list[int]]:
    """Prompts: a passage each, over and over."""
    source, chosen = text(), random.Random(seed)
    starts = [chosen.randrange(len(source) - PASSAGE) for _ in range(count)]
    repeats = -(-length // PASSAGE)
    return [source[start : start + PASSAGE].repeat(repeats)[:length].tolist() for start in starts]


def train(folder: Path, *, steps: int = 200, seed: int = 0) -> None:
    """Write `target`, `draft_model` and `eagle` into `folder`, each trained for a number of steps."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # layers this small lose more to waiting for each other than they win
    data = text()
    target = LlamaForCausalLM(_config(hidden=96, layers=2))
    _look_back(target)
    _train_language_model(target, data, steps, teacher=None)
    target.save_pretrained(folder / "target")
    draft = LlamaForCausalLM(_config(hidden=64, layers=1))
    _look_back(draft)
    _train_language_model(draft, data, steps, teacher=target)
    draft.save_pretrained(folder / "draft_model")
    eagle = _Eagle(target.config)
    eagle.look_back(target)
    _train_eagle(eagle, target, data, steps)
    eagle.write(folder / "eagle")


def _config(*, hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def _look_back(model: LlamaForCausalLM) -> None:
    """A head start, without which a minute is too short: one head per layer looks a passage back, whatever it reads."""
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 8 * embeddings.abs().mean()  # the one dimension that is the same in all tokens
        for layer in model.model.layers:
            _look_back_in(layer, model.model.rotary_emb.inv_freq)


def _look_back_in(layer: Any, frequencies: torch.Tensor) -> None:
    query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    query[:32], key[:32] = 0.0, 0.0
    angles = frequencies * (PASSAGE - 1)
    key[:16, 0] = 1.0
    query[:16, 0], query[16:32, 0] = torch.cos(angles), -torch.sin(angles)


class _Eagle(nn.Module):
    """EAGLE's draft: the target's hidden state and the next token's embedding, through one layer, to the next state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer: Any = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()

    def look_back(self, target: LlamaForCausalLM) -> None:
        """As `_look_back`."""
        with torch.no_grad():
            self.fc.weight[0] = 0.0
            self.fc.weight[0, 0] = 4.0 / target.model.embed_tokens.weight[0, 0]
            _look_back_in(self.layer, target.model.rotary_emb.inv_freq)

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


def _batches(data: torch.Tensor, steps: int, *, size: int = 8) -> Iterator[torch.Tensor]:
    """Passages over and over, one byte in 33 wrong, so that what comes back is not all there is to learn."""
    for _ in range(steps):
        starts = torch.randint(0, len(data) - PASSAGE, (size,))
        batch = torch.stack([data[start : start + PASSAGE] for start in starts]).repeat(1, _WINDOW // PASSAGE)
        yield torch.where(torch.rand(batch.shape) < 0.03, torch.randint(0, VOCABULARY, batch.shape), batch)


def _train_language_model(
    model: LlamaForCausalLM, data: torch.Tensor, steps: int, *, teacher: LlamaForCausalLM | None
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loss = torch.tensor(0.0)
    for batch in _batches(data, steps):
        logits = model(batch).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(batch).logits[:, :-1].softmax(-1)
            loss = loss + functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        _learn(optimizer, loss)
    print(f"trained {sum(p.numel() for p in model.parameters())} parameters for {steps} steps: loss {loss.item():.3f}")


def _train_eagle(eagle: _Eagle, target: LlamaForCausalLM, data: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(eagle.parameters(), lr=3e-3, weight_decay=0.01)
    loss = torch.tensor(0.0)
    rope = target.model.rotary_emb
    for batch in _batches(data, steps):
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
        _learn(optimizer, loss)
    print(f"trained EAGLE for {steps} steps: loss {loss.item():.3f}")


def _learn(optimizer: torch.optim.AdamW, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
