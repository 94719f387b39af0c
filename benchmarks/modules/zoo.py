"""Tiny random models as libraries make them, each with inputs that are a function of the step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, TOKENS, BATCH, CLASSES = 97, 12, 3, 5
SIZE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

Made = tuple[nn.Module, Callable[[nn.Module, torch.Generator], Tensor]]
"""A module, and its loss on inputs of a generator."""


def text(g: torch.Generator) -> Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, TOKENS), generator=g)


def image(g: torch.Generator) -> Tensor:
    return torch.randn(BATCH, 3, 16, 16, generator=g)


def classes(g: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=g)


def causal(model: nn.Module, g: torch.Generator) -> Tensor:
    tokens = text(g)
    return model(input_ids=tokens, labels=tokens).loss


def classifier(model: nn.Module, g: torch.Generator) -> Tensor:
    return model(pixel_values=image(g), labels=classes(g)).loss


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ), causal


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**SIZE, vocab_size=VOCABULARY, intermediate_size=40, num_key_value_heads=1)
    ), causal


def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **SIZE,
            vocab_size=VOCABULARY,
            intermediate_size=24,
            num_key_value_heads=1,
            num_local_experts=8,
            output_router_logits=True,
        )
    ), causal


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SIZE, vocab_size=VOCABULARY, intermediate_size=32, num_labels=CLASSES)
    return BertForSequenceClassification(config), lambda m, g: m(input_ids=text(g), labels=classes(g)).loss


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), lambda m, g: m(input_ids=text(g), labels=text(g)).loss


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SIZE, image_size=16, patch_size=4, intermediate_size=32, num_labels=CLASSES)
    return ViTForImageClassification(config), classifier


def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    size = {**SIZE, "intermediate_size": 32}
    config = CLIPConfig(
        text_config={**size, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 1},
        vision_config={**size, "image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    return CLIPModel(config), lambda m, g: m(input_ids=text(g), pixel_values=image(g), return_loss=True).loss


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(
        config
    ), lambda m, g: m(input_features=torch.randn(BATCH, 8, 40, generator=g), labels=text(g)).loss


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=CLASSES)
    return ResNetForImageClassification(config), classifier


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES)
    return ConvNextForImageClassification(config), classifier


def channels_last_resnet() -> Made:
    model, loss = resnet()
    return model.to(memory_format=torch.channels_last), loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def lstm() -> Made:
    def loss(model: nn.Module, g: torch.Generator) -> Tensor:
        tokens = text(g)
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Recurrent(), loss


class GraphNetwork(nn.Module):
    """Two rounds of messages along the edges of a graph; what a node receives is added up by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * 8, 8) for _ in range(2))
        self.update = nn.ModuleList(nn.GRUCell(8, 8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat((nodes[source], nodes[target]), -1)).relu()
            nodes = update(torch.zeros_like(nodes).index_add(0, target, sent), nodes)
        return self.head(nodes)


def graph() -> Made:
    def loss(model: nn.Module, g: torch.Generator) -> Tensor:
        nodes, edges = torch.randn(20, 8, generator=g), torch.randint(20, (2, 60), generator=g)
        return functional.cross_entropy(model(nodes, edges), torch.randint(CLASSES, (20,), generator=g))

    return GraphNetwork(), loss


def lora() -> Made:
    from peft import LoraConfig, get_peft_model

    model, loss = gpt2()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)), loss


ZOO: dict[str, Callable[[], Made]] = {
    "GPT-2 (transformers)": gpt2,
    "Llama (transformers)": llama,
    "Mixtral, experts without tokens (transformers)": mixtral,
    "BERT (transformers)": bert,
    "T5 (transformers)": t5,
    "ViT (transformers)": vit,
    "CLIP, a scalar parameter (transformers)": clip,
    "Whisper (transformers)": whisper,
    "ResNet (transformers)": resnet,
    "ResNet in channels_last (transformers)": channels_last_resnet,
    "ConvNeXt (transformers)": convnext,
    "LSTM (torch)": lstm,
    "graph network (torch)": graph,
    "LoRA on GPT-2 (peft)": lora,
}


def make(name: str) -> tuple[nn.Module, Any]:
    """A module with the same random weights at each call, in training mode, and its loss."""
    torch.manual_seed(1)
    module, loss = ZOO[name]()
    return module.train(), loss
