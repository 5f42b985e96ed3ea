"""llama.cpp by its C interface, from llama-cpp-python: batches of sequences, as llama.cpp's own server makes them."""

from __future__ import annotations

import ctypes

import llama_cpp as c
import numpy as np

from bench.offline import Work

BATCH, STEP = 2048, 512  # llama.cpp's own: tokens of one call, and of one pass through the model


class LlamaCpp:
    def __init__(self, model: str) -> None:
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(BATCH, 0, 1)
        self._context, self._shape = None, (0, 0)
        self._prompts: list[list[int]] = []
        self._first: list[int] = []

    def begin(self, work: Work) -> None:
        shape = (len(work.prompts), -(-(len(work.prompts[0]) + work.steps + 1) // 256) * 256)
        if shape != self._shape:
            self._open(*shape)
        memory = c.llama_get_memory(self._context)
        if work.kind != "decode":
            self._prompts = []
            c.llama_memory_clear(memory, False)
        elif work.prompts != self._prompts:
            c.llama_memory_clear(memory, False)
            self._prompts, self._first = work.prompts, self._prefill(work.prompts)
        else:
            for row, prompt in enumerate(work.prompts):
                c.llama_memory_seq_rm(memory, row, len(prompt), -1)

    def window(self, work: Work) -> list[list[int]]:
        start = len(work.prompts[0])
        if work.kind == "decode":
            return self._decode(self._first, start, work.steps)
        first = self._prefill(work.prompts)
        if work.kind == "prefill":
            return [first]
        rest = self._decode(first, start, work.steps - 1)
        return [[token, *more] for token, more in zip(first, rest, strict=True)]

    def _open(self, sequences: int, length: int) -> None:
        if self._context:
            c.llama_free(self._context)
        wish = c.llama_context_default_params()
        wish.n_ctx, wish.n_seq_max = sequences * length, sequences
        wish.n_batch, wish.n_ubatch = BATCH, STEP
        wish.n_threads = wish.n_threads_batch = 1
        wish.no_perf = True
        self._context = c.llama_init_from_model(self._model, wish)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context for {sequences} sequences of {length} tokens")
        self._shape, self._prompts = (sequences, length), []

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """Whole prompts, as many as fit into a call; one longer than a call in several."""
        drawn, entries = [], list[tuple[int, int, int, bool]]()
        for row, prompt in enumerate(prompts):
            if len(entries) + len(prompt) > BATCH:
                drawn += self._call(entries)
                entries = []
            for at, token in enumerate(prompt):
                if len(entries) == BATCH:
                    drawn += self._call(entries)
                    entries = []
                entries.append((token, at, row, at == len(prompt) - 1))
        return drawn + self._call(entries)

    def _decode(self, tokens: list[int], start: int, steps: int) -> list[list[int]]:
        answers = []
        for at in range(start, start + steps):
            tokens = self._call([(token, at, row, True) for row, token in enumerate(tokens)])
            answers.append(tokens)
        return [list(answer) for answer in zip(*answers, strict=True)]

    def _call(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, wanted) each; returns the greedy token after each wanted one."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
        if code := c.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode answered {code} to {len(entries)} tokens")
        return [self._best(i) for i, entry in enumerate(entries) if entry[3]]

    def _best(self, i: int) -> int:
        line = ctypes.cast(c.llama_get_logits_ith(self._context, i), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(line, (self._vocab,)).argmax())


def open_subject(model: str, dtype: str) -> LlamaCpp:
    return LlamaCpp(model)
