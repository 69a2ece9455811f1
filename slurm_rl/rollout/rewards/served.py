"""The chat template of a served reward model, which is not the policy's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from slurm_rl.errors import ModelError


class ServedTokenizer:
    """Makes token ids of a conversation by the template beside the served model.

    The tokenizer is loaded when it is first asked, and used in another thread, one call at a time.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    async def __call__(self, messages: list[dict[str, Any]]) -> list[int]:
        """Raises ModelError if the folder has no tokenizer with a chat template."""
        return await asyncio.to_thread(self._tokenize, messages)

    def _tokenize(self, messages: list[dict[str, Any]]) -> list[int]:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            tokens = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return [int(token) for token in tokens]

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:  # a damaged file raises whatever its parser raises
            raise ModelError(
                f"score.server.hf_checkpoint = {self._folder!r}: its tokenizer cannot be loaded"
                f" ({type(error).__name__}: {error})",
                hint="the model's tokenizer files are missing or damaged",
            ) from error
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"score.server.hf_checkpoint = {self._folder!r} has no chat template",
                hint="served_rm judges conversations; add the template that the model was"
                " trained with",
            )
        return tokenizer
