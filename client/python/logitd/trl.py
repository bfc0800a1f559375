"""The teacher of TRL's distillation trainers, with logitd as its output head.

    from logitd.trl import Teacher
    trainer.teacher_client = Teacher(teacher, client, head="teacher")

In place of trl's VLLMClient, for the trainers that score finished sequences by `teacher_client`. The log-probability of
the actual token is exact, also where it is not among the top ones.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch

from logitd import _arrays
from logitd.client import Client
from logitd.errors import InvalidArgument
from logitd.transformers import TYPES

_NAMES = ("logprobs", "logprob_token_ids", "actual_logprobs", "actual_token_ids")


class Teacher:
    """Scores token sequences: the model's trunk runs here, in torch, and its output head in the server.

    model: a causal language model of transformers, in evaluation mode.
    head: the name of the model's head in the server, loaded without its final norm; None: the model makes its logits
        here, and they are sent, V numbers a token in place of the hidden size.
    batch_tokens: the most tokens, with padding, that the model gets at once.
    """

    def __init__(self, model: Any, client: Client, *, head: Optional[str] = None, batch_tokens: int = 16384) -> None:
        if model.training:
            raise InvalidArgument("model: got one in training mode, allowed one after model.eval()")
        self._model, self._client, self._head = model, client, head
        self._batch_tokens = _arrays.whole("batch_tokens", batch_tokens, 1)

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
        chunk_size: int = 0,
        max_concurrent_requests: int = 4,
    ) -> Dict[str, List[Any]]:
        """The teacher's log-probabilities of the tokens after each prompt, at `temperature`.

        sequences: token ids, prompt and completion. prompt_lengths: tokens of each that are the prompt.
        top_logprobs: 1 to 128, how many of the most probable tokens are reported at each place.
        chunk_size: the most sequences that the model gets at once; 0: as batch_tokens says.
        max_concurrent_requests: not used; it is there for callers of VLLMClient.

        Returns lists by sequence and place: `logprobs` and `logprob_token_ids` of the top tokens, the most probable
        first, with -inf and 0 after the vocabulary's end; `actual_logprobs` and `actual_token_ids` of the token at that
        place, a list of one. The first token of a sequence without a prompt has -inf: nothing comes before it.

        InvalidArgument: lengths that do not fit the sequences; otherwise as Client.score_stream.
        """
        if len(sequences) != len(prompt_lengths):
            raise InvalidArgument(f"prompt_lengths: got {len(prompt_lengths)}, allowed {len(sequences)} (sequences)")
        for i, (tokens, length) in enumerate(zip(sequences, prompt_lengths)):
            if not 0 <= length <= len(tokens) or not tokens:
                raise InvalidArgument(
                    f"prompt_lengths: got {length} at sequence {i}, allowed 0..{len(tokens)}, of 1 token or more"
                )
        top = _arrays.whole("top_logprobs", top_logprobs, 1, 128)
        out: Dict[str, List[Any]] = {name: [] for name in _NAMES}
        begin = 0
        while begin < len(sequences):
            end = self._end_of_batch(sequences, begin, chunk_size)
            part = self._score(sequences[begin:end], prompt_lengths[begin:end], top, temperature)
            for name, values in part.items():
                out[name] += values
            begin = end
        return out

    def _end_of_batch(self, sequences: Sequence[Sequence[int]], begin: int, chunk_size: int) -> int:
        most = len(sequences) if chunk_size <= 0 else min(len(sequences), begin + chunk_size)
        end, longest = begin, 0
        while end < most:
            longest = max(longest, len(sequences[end]))
            if end > begin and longest * (end + 1 - begin) > self._batch_tokens:
                break
            end += 1
        return end

    def _rows(self, sequences: Sequence[Sequence[int]], firsts: List[int]) -> Any:
        """For each token from `firsts` on, the hidden state or the logits of the token before it."""
        longest = max(map(len, sequences))
        device = self._model.device
        ids = torch.zeros((len(sequences), longest), dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for i, tokens in enumerate(sequences):
            ids[i, : len(tokens)] = torch.tensor(tokens, device=device)
            mask[i, : len(tokens)] = 1
        with torch.no_grad():
            if self._head is None:
                states = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            else:
                states = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        pairs = enumerate(zip(sequences, firsts))
        return torch.cat([states[i, first - 1 : len(tokens) - 1] for i, (tokens, first) in pairs])

    def _score(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], top: int, temperature: float
    ) -> Dict[str, List[Any]]:
        firsts = [max(1, length) for length in prompt_lengths]  # nothing tells of a sequence's first token
        rows = self._rows(sequences, firsts)
        targets = [token for tokens, first in zip(sequences, firsts) for token in tokens[first:]]
        logprobs = np.full((len(targets), top), -np.inf, np.float32)
        ids = np.zeros((len(targets), top), np.int64)
        actual = np.full(len(targets), -np.inf, np.float32)
        if targets:
            if self._head is None:
                given: Dict[str, Any] = dict(logits=rows)
                vocab = rows.shape[-1]
            else:
                head = self._client.get_head(self._head)
                given, vocab = dict(hidden=rows.to(TYPES[head.dtype]), head=self._head), head.vocab
            k = min(top, vocab)
            got = self._client.score_stream(
                **given, targets=np.asarray(targets), temperature=temperature, top_logprobs=k
            )
            found = np.asarray(got.top_ids.values).reshape(-1, k)
            values = np.asarray(got.top_logprobs.values).reshape(-1, k)
            faulty = (found < 0) | np.isnan(values)
            ids[:, :k] = np.where(faulty, 0, found)
            logprobs[:, :k] = np.where(faulty, -np.inf, values)
            actual = np.nan_to_num(np.asarray(got.target_logprobs), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        out: Dict[str, List[Any]] = {name: [] for name in _NAMES}
        at = 0
        for tokens, length, first in zip(sequences, prompt_lengths, firsts):
            rest = slice(at, at + len(tokens) - first)
            at = rest.stop
            before = first - length  # 1 for the first token of a sequence without a prompt
            out["logprobs"].append([[-np.inf] * top] * before + logprobs[rest].tolist())
            out["logprob_token_ids"].append([[0] * top] * before + ids[rest].tolist())
            out["actual_logprobs"].append([[-np.inf]] * before + actual[rest, None].tolist())
            out["actual_token_ids"].append([[token] for token in tokens[length:]])
        return out
