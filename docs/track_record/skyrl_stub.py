"""What scripts on SkyRL share: it asks for Python 3.12 for one class, says much, and wants a tokenizer."""

import importlib.metadata
import logging
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict
VERSION = importlib.metadata.version("skyrl")
logging.disable(logging.CRITICAL)
try:
    from loguru import logger

    logger.remove()
except (ImportError, ValueError):
    pass


class Tokenizer:
    """Spells ids in decimal."""

    pad_token_id, eos_token_id, eos_token = 0, 9, "<eos>"

    def apply_chat_template(self, messages, **_):
        return [
            int(word)
            for message in messages
            for word in message["content"].split()
            if word.isdigit()
        ]

    def batch_decode(self, rows):
        return [" ".join(map(str, row)) for row in rows]
