"""What the models of transformers are trained to do: a batch with the labels for it.

Language models get random tokens, image classifiers random pixels; the loss is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sac_search.ready.training import random_classes, random_images

_MOST_TOKENS = 2048
"""In a sample, when nobody says."""
_UNKNOWN_POSITIONS = 512
"""Tokens in a sample of a model whose config limits them by no name that is known here."""
_IMAGE_SIZE = 224
_IGNORED = -100
"""The label that transformers leaves out of the loss."""
_MASKED_FRACTION = 0.15

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the batch of a model depends on."""

    config: Any
    """The model's config, of transformers."""
    batch_size: int
    """Samples in a step."""
    sequence_length: int
    """Tokens in a sample, where there are any."""
    generator: torch.Generator
    """What random numbers come from."""

    def tokens(self) -> Tensor:
        """Returns random tokens [batch, sequence], none of which means anything by itself."""
        text = self.config.get_text_config()
        plain = torch.ones(text.vocab_size, dtype=torch.bool, device="cpu")
        for token in _special_tokens(self.config.to_dict()):
            if 0 <= token < text.vocab_size:
                plain[token] = False
        known = plain.nonzero().flatten()
        shape = (self.batch_size, self.sequence_length)
        return known[random_classes(shape, len(known), self.generator)]

    def classes(self, *shape: int) -> Tensor:
        """Returns labels as the config's `problem_type` wants them, for one answer per `shape`."""
        count, problem = self.config.num_labels, getattr(self.config, "problem_type", None)
        if problem == "multi_label_classification":
            return random_classes((*shape, count), 2, self.generator).float()
        if problem == "regression" or (problem is None and count == 1):
            size = shape if count == 1 else (*shape, count)
            return torch.randn(size, generator=self.generator, device="cpu")
        return random_classes(shape, count, self.generator)


def _special_tokens(config: Mapping[Any, Any]) -> set[int]:
    """Returns the numbers of padding, beginnings, ends, images and the like."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _special_tokens(value)
        elif str(name).endswith(("_token_id", "_token_index")):
            values = value if isinstance(value, list) else [value]
            found.update(v for v in values if isinstance(v, int))
    return found


def _next_token_batch(sizes: Sizes) -> Batch:
    tokens = sizes.tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _translation_batch(sizes: Sizes) -> Batch:
    # The decoder's inputs are given, since to shift labels a config has to name a first token.
    return {
        "input_ids": sizes.tokens(),
        "decoder_input_ids": sizes.tokens(),
        "labels": sizes.tokens(),
    }


def _masked_batch(sizes: Sizes) -> Batch:
    tokens = sizes.tokens()
    masked = torch.rand(tokens.shape, generator=sizes.generator, device="cpu") < _MASKED_FRACTION
    masked[:, 0] = True  # a loss over no token would be no number
    return {"input_ids": tokens, "labels": tokens.masked_fill(~masked, _IGNORED)}


def _text_class_batch(sizes: Sizes) -> Batch:
    tokens = sizes.tokens()
    if sizes.config.is_encoder_decoder:  # these look for the end of the text
        tokens[:, -1] = sizes.config.eos_token_id
    return {"input_ids": tokens, "labels": sizes.classes(sizes.batch_size)}


def _token_class_batch(sizes: Sizes) -> Batch:
    tokens = sizes.tokens()
    return {"input_ids": tokens, "labels": sizes.classes(*tokens.shape)}


def _answer_batch(sizes: Sizes) -> Batch:
    begin, end = random_classes((2, sizes.batch_size), sizes.sequence_length, sizes.generator)
    return {"input_ids": sizes.tokens(), "start_positions": begin, "end_positions": end}


def _image_class_batch(sizes: Sizes) -> Batch:
    pixels = random_images((sizes.batch_size, *image_shape(sizes.config)), sizes.generator)
    return {"pixel_values": pixels, "labels": sizes.classes(sizes.batch_size)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a model is trained to do."""

    name: str
    """For people, with its article."""
    mapping: str
    """The table of transformers that holds the class for each type of model."""
    make_batch: Callable[[Sizes], Batch]
    """Makes inputs and labels, on the CPU."""
    peft_type: str | None = None
    """What peft calls it."""

    @property
    def takes_images(self) -> bool:
        """Whether its inputs are pixels, not tokens."""
        return self.make_batch is _image_class_batch


CAUSAL = Task(
    name="a causal language model",
    mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    make_batch=_next_token_batch,
    peft_type="CAUSAL_LM",
)
SEQ2SEQ = Task(
    name="a sequence-to-sequence model",
    mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    make_batch=_translation_batch,
    peft_type="SEQ_2_SEQ_LM",
)
MASKED = Task(
    name="a masked language model",
    mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    make_batch=_masked_batch,
)
IMAGE_CLASSES = Task(
    name="an image classifier",
    mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    make_batch=_image_class_batch,
)
TEXT_CLASSES = Task(
    name="a sequence classifier",
    mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    make_batch=_text_class_batch,
    peft_type="SEQ_CLS",
)
ANSWERS = Task(
    name="a question answerer",
    mapping="MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    make_batch=_answer_batch,
    peft_type="QUESTION_ANS",
)
TOKEN_CLASSES = Task(
    name="a token classifier",
    mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    make_batch=_token_class_batch,
    peft_type="TOKEN_CLS",
)
IMAGES_AND_TEXT = Task(
    name="an image-text model on text alone",
    mapping="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    make_batch=_next_token_batch,
    peft_type="CAUSAL_LM",
)
# A class that is in two tables, as those of images and text, belongs to the first.
TASKS = (
    IMAGES_AND_TEXT,
    CAUSAL,
    SEQ2SEQ,
    MASKED,
    IMAGE_CLASSES,
    TEXT_CLASSES,
    TOKEN_CLASSES,
    ANSWERS,
)


def default_sequence_length(config: Any) -> int:
    """Returns the largest power of two that the model has positions for, 2048 at the most.

    Some models count their positions from two.
    """
    tokens = min(positions_of(config) or _UNKNOWN_POSITIONS, _MOST_TOKENS)
    return 1 << (tokens.bit_length() - 1)


def positions_of(config: Any) -> int | None:
    """Returns how many tokens the model has positions for; None if its config does not say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def image_shape(config: Any) -> tuple[int, int, int]:
    """Returns channels, height and width of the images that the model takes."""
    channels, size = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else [size or _IMAGE_SIZE] * 2
    return channels or 3, height, width
