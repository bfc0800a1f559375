"""lm-evaluation-harness with logitd as a model's output head, scorer and sampler.

    python -m logitd.lm_eval run --model logitd --model_args pretrained=DIR,address=HOST:PORT,head=NAME --tasks ...

The harness has no entry point for models, so this module must be imported: as above, in place of the command `lm_eval`,
or by `import logitd.lm_eval` before `lm_eval.simple_evaluate(model="logitd", ...)`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from lm_eval.models.utils_hf import pad_and_concat, stop_sequences_criteria
from tqdm import tqdm

from logitd import _arrays
from logitd._generation import FIELDS, sampling_of
from logitd.client import Client
from logitd.errors import InvalidArgument
from logitd.transformers import TYPES, generate, get_head

_Request = Tuple[Optional[Tuple[str, str]], List[int], List[int]]  # texts, context, continuation


@register_model("logitd")
class LogitdLM(HFLM):
    """The harness's `hf` model, with the numbers and tokens from logitd: the trunk runs here, in torch.

    Tokens, truncation, batches and windows are those of `hf`. Sampling parameters in gen_kwargs become parameters of
    Client.sample, see _generation.sampling_of.

    pretrained: a causal language model of transformers, or its folder or name.
    address: of the server, as Client takes it; or `client`, one with options of its own.
    head: the name of the model's head in the server, loaded without its final norm; None: the model makes its logits
        here, and they are sent.
    seed: of the first text that is generated; every later one has the next number. Only with do_sample.
    options: all others of `hf`, such as batch_size, max_length and dtype.

    InvalidArgument: no server, or two; a head of another hidden size or with a norm; an encoder-decoder model, peft
    (merge it first) or softmax_dtype (sums are f32). Errors of calls: as Client.score_stream and Client.sample.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        address: Optional[str] = None,
        client: Optional[Client] = None,
        head: Optional[str] = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if (address is None) == (client is None):
            raise InvalidArgument(f"address: got {address!r:.80} and a client of {client!r:.80}, allowed one of them")
        for name in ("peft", "softmax_dtype"):
            if options.get(name) is not None:
                raise InvalidArgument(f"{name}: got {options[name]!r:.80}, allowed None")
        self._client: Client = Client(address) if client is None else client  # type: ignore[arg-type]  # one is there
        self._head = None if head is None else get_head(self._client, head)
        self._seed = _arrays.whole("seed", seed, 0)
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise InvalidArgument(f"backend: got {self.backend!r}, allowed 'causal'")
        width = self.model.config.get_text_config().hidden_size
        if self._head is not None and self._head.hidden != width:
            raise InvalidArgument(
                f"head: got {head!r} of hidden size {self._head.hidden}, allowed the model's: {width}"
            )

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """[N, length, D] hidden states, or without a head [N, length, V] logits, of token ids [N, length]."""
        if self._head is None:
            logits: torch.Tensor = super()._model_call(inps)
            return logits
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            states: torch.Tensor = self.model.base_model(inps, use_cache=False).last_hidden_state
        return states

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: Optional[int] = None
    ) -> List[Tuple[float, bool]]:
        """For each request, the sum of its continuation's log-probabilities, in nats, and whether it is greedy.

        The model runs once for all requests that differ only in their last token. A context that is too long loses its
        first tokens.
        """
        groups: Dict[Tuple[int, ...], List[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length or not context:
                raise InvalidArgument(
                    f"continuation: got {len(continuation)} tokens after {len(context)}, allowed 1 to "
                    f"{self.max_length} after 1 or more"
                )
            groups.setdefault(self._inputs(requests[i]), []).append(i)
        firsts = [requests[members[0]] for members in groups.values()]
        out: List[Tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for chunk in self._batches(firsts, override_bs):
            inputs = [self._inputs(request) for request in chunk]
            members = [(row, i) for row, tokens in enumerate(inputs) for i in groups[tokens]]
            answers = self._score(inputs, [(row, requests[i][2]) for row, i in members])
            for (_, i), answer in zip(members, answers):
                out[i] = answer
                texts = requests[i][0]
                if texts is not None:  # None: a window of loglikelihood_rolling, which is no request of its own
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            bar.update(len(members))
        bar.close()
        return out

    def _inputs(self, request: _Request) -> Tuple[int, ...]:
        """The tokens that the model gets: at most max_length, without the last one, which is only a target."""
        return tuple((request[1] + request[2])[-(self.max_length + 1) : -1])

    def _batches(self, requests: List[_Request], size: Optional[int]) -> Any:
        """The requests in batches, the longest first. size: with the batch size "auto", that of all batches."""
        order = Collator(requests, sort_fn=lambda request: (-len(request[1]) - len(request[2]), request[1:]))
        if self.batch_size != "auto":
            return order.get_batched(n=self.batch_size)
        if size is not None:
            return order.get_batched(n=size)
        self.batch_sizes: Dict[int, int] = {}  # measured anew for the lengths of these requests
        return order.get_batched(n=0, batch_fn=self._batch_scheduler if requests else None)

    def _score(
        self, inputs: Sequence[Tuple[int, ...]], targets: Sequence[Tuple[int, List[int]]]
    ) -> List[Tuple[float, bool]]:
        """targets: the row of `inputs`, and the tokens at its end and after it."""
        rows = [torch.tensor(tokens, dtype=torch.long, device=self.device) for tokens in inputs]
        states = self._model_call(pad_and_concat(max(map(len, inputs)), rows, padding_side="right"))
        places = [states[row, len(inputs[row]) - len(tokens) : len(inputs[row])] for row, tokens in targets]
        taken = torch.cat(places)
        if self._head is None:
            given: Dict[str, Any] = dict(logits=taken)
        else:
            given = dict(hidden=taken.to(TYPES[self._head.dtype]), head=self._head.name)
        wanted = np.asarray([token for _, tokens in targets for token in tokens])
        got = self._client.score_stream(**given, targets=wanted, want_rank=True)
        ends = np.cumsum([len(tokens) for _, tokens in targets])[:-1]
        logprobs = np.split(np.asarray(got.target_logprobs, np.float64), ends)
        ranks = np.split(np.asarray(got.ranks), ends)
        return [(float(values.sum()), bool((places == 1).all())) for values, places in zip(logprobs, ranks)]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: List[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """[N, up to max_length] token ids, with `context` [N, length] at the beginning of each row."""
        rest = dict(generation_kwargs)
        draws = [name for name in rest if name in FIELDS and FIELDS[name].chooses]
        config = SimpleNamespace(**{name: rest.pop(name) for name in draws})
        if getattr(config, "temperature", None) == 0.0 and not getattr(config, "do_sample", None):
            config.do_sample = False
        seeds = [self._seed + row for row in range(len(context))]
        self._seed += len(context)
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            tokens: torch.Tensor = generate(
                self.model,
                self._client,
                input_ids=context,
                seed=seeds,
                head=None if self._head is None else self._head.name,
                sampling=sampling_of(config, self.model.generation_config),
                max_length=max_length,
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **rest,
            )
        return tokens


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
