"""A multimodal model with a tokenizer and a chat template, small enough for a CPU."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = ["router", "cache", "engine", "weather", "page", "token", "function", "city", "Paris", "hello", "answer"]
WORDS += ["question", "the", "is", "of", "and"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
_SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
_TEMPLATE = """
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def trained_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of 600 tokens. It is the same each time."""
    rng = random.Random(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(300)], trainer)
    return tokenizer


def write_model(folder: Path) -> Path:
    """Write the files that an engine reads. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="Qwen2TokenizerFast",
        model_max_length=4096,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
        additional_special_tokens=_SPECIAL[1:],
    )
    _write(
        folder / "preprocessor_config.json",
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2VLProcessor",
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        min_pixels=784,
        max_pixels=50176,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    config = json.loads((Path(__file__).parent / "models" / "one-group" / "config.json").read_text())
    _write(
        folder / "config.json",
        **config
        | {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_config": {
                "depth": 1,
                "embed_dim": 64,
                "num_heads": 2,
                "hidden_size": 64,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "mlp_ratio": 2,
            },
        },
    )
    return folder


def _write(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields))
