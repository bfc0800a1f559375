"""`generate` of Hugging Face transformers, with logitd drawing the tokens.

    from logitd.transformers import generate
    tokens = generate(model, client, **inputs, seed=7, sampling=dict(temperature=0.8, top_p=0.9), max_new_tokens=50)

With `head=`, the model's own output head does not run: its hidden states go to the server, which has the head loaded.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import transformers

from logitd import _arrays
from logitd.client import Client
from logitd.errors import InvalidArgument
from logitd.results import RowStatus, SampleResult

# Arguments of transformers that say how tokens are chosen, with the values that leave that to logitd.
_NEUTRAL: Dict[str, Tuple[Any, ...]] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "temperature": (1.0,),
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "prompt_lookup_num_tokens": (),
    "assistant_model": (),
    "custom_generate": (),
}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class _NoHead(torch.nn.Module):
    """In place of a model's output head: keeps the hidden states, and gives logits of 0, which take no memory."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.hidden: Optional[torch.Tensor] = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden[:, -1].detach()
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self.vocab)


class Sampler(transformers.LogitsProcessor):
    """A LogitsProcessor that draws each row's next token with logitd, and leaves generate only that one.

    It must be the last processor, with do_sample=False and without beams; generate() below sees to that. Processors
    before it have their effect, except with `head`. One sampler is for one call of generate.

    client: of the server that draws.
    seed: one for all rows, and row i then has seed + i; or one per row. A row's tokens are drawn at positions 0, 1, ...
    head: name of a loaded head. Use attached() around generate.
    sampling: parameters of Client.sample, except seed, position, hidden, head and history. Penalties see all tokens so
        far, the prompt and its padding included, as those of transformers do.

    results: what Client.sample gave, step by step.
    """

    def __init__(
        self,
        client: Client,
        *,
        seed: Union[int, Sequence[int]],
        head: Optional[str] = None,
        sampling: Optional[Mapping[str, Any]] = None,
    ) -> None:
        taken = {"seed", "position", "hidden", "head", "history"} & set(sampling or {})
        if taken:
            raise InvalidArgument(
                f"sampling: got {', '.join(sorted(taken))}, allowed are the other parameters of sample"
            )
        if not isinstance(client, Client):
            raise InvalidArgument(f"client: got {client!r:.80}, allowed a logitd.Client: generate blocks")
        self.results: List[SampleResult] = []
        self._client = client
        seeds = _arrays.integers("seed", seed, np.dtype(np.uint64))
        if seeds.ndim > 1:
            raise InvalidArgument(f"seed: got {seeds.ndim} dimensions, allowed one seed, or one per row")
        self._seed: Union[int, List[int]] = seeds.tolist()
        self._sampling = dict(sampling or {})
        self._head = None if head is None else client.get_head(head)
        if self._head is not None and self._head.final_norm:
            raise InvalidArgument(
                f"head: got {head!r}, loaded with its final norm, which the model has done already; allowed "
                "is a head without"
            )
        self._no_head: Optional[_NoHead] = None

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator["Sampler"]:
        """Takes the model's output head out, where the sampler has a head on the server. The model is not for other use
        meanwhile."""
        if self._head is None:
            yield self
            return
        own = model.get_output_embeddings()
        width = model.config.get_text_config().hidden_size
        if width != self._head.hidden:
            raise InvalidArgument(
                f"head: got {self._head.name!r} of hidden size {self._head.hidden}, allowed is the model's: {width}"
            )
        self._no_head = _NoHead(self._head.vocab)
        model.set_output_embeddings(self._no_head)
        try:
            yield self
        finally:
            model.set_output_embeddings(own)
            self._no_head = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[N, V]: 0 for the token drawn in each row, -inf for all others. ValueError: a row has no token to draw."""
        result = self._sample(input_ids, scores)
        self.results.append(result)
        if not bool(result.ok.all()):
            row = int((~result.ok).nonzero()[0])
            raise ValueError(
                f"row {row}: {RowStatus(int(result.status[row])).name}, at token {int(result.status_position[row])}"
            )
        tokens = torch.as_tensor(result.tokens).to(device=scores.device, dtype=torch.int64)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def _sample(self, input_ids: torch.Tensor, scores: torch.Tensor) -> SampleResult:
        params = dict(self._sampling)
        rows = scores.shape[0]
        params["seed"] = [self._seed + row for row in range(rows)] if isinstance(self._seed, int) else self._seed
        if len(params["seed"]) != rows:
            raise InvalidArgument(f"seed: got {len(params['seed'])} seeds, allowed one, or {rows} (rows)")
        params["position"] = len(self.results)
        if any(name in params for name in _PENALTIES):
            params["history"] = input_ids
        if self._head is None:
            return self._client.sample(scores.float(), **params)
        if self._no_head is None or self._no_head.hidden is None:
            raise RuntimeError(
                "sampler: got a head but the model's own ran, allowed is generate within attached(model)"
            )
        if bool(scores.any()):
            raise InvalidArgument(
                "logits_processor: got one that changes logits, and with a head there are none; allowed are "
                "the parameters of sampling"
            )
        hidden = self._no_head.hidden.to(_TYPES[self._head.dtype])
        return self._client.sample(hidden=hidden, head=self._head.name, **params)


def generate(
    model: Any,
    client: Client,
    *args: Any,
    seed: Union[int, Sequence[int]],
    head: Optional[str] = None,
    sampling: Optional[Mapping[str, Any]] = None,
    **kwargs: Any,
) -> Any:
    """model.generate(*args, **kwargs), with tokens drawn by logitd. Sampler has seed, head and sampling.

    InvalidArgument: arguments, also of a `generation_config`, that leave the choice of tokens to transformers, such as
    do_sample, num_beams, temperature or typical_p; or num_return_sequences: repeat rows of the prompt instead. What the
    model's own generation_config says of them does not count.
    """
    _check_choice(kwargs)
    sampler = Sampler(client, seed=seed, head=head, sampling=sampling)
    processors = [*(kwargs.pop("logits_processor", None) or []), sampler]
    ours = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None}
    with sampler.attached(model):
        return model.generate(
            *args, **{**kwargs, **ours}, logits_processor=transformers.LogitsProcessorList(processors)
        )


def _check_choice(kwargs: Mapping[str, Any]) -> None:
    config = kwargs.get("generation_config")
    if not isinstance(config, (transformers.GenerationConfig, type(None))):
        raise InvalidArgument(f"generation_config: got {config!r:.80}, allowed a transformers.GenerationConfig")
    default = transformers.GenerationConfig()
    for name, neutral in _NEUTRAL.items():
        unset = (None, getattr(default, name, None))  # of a config; top_k is 50 in some versions
        for where, value, allowed in (
            (name, kwargs.get(name), (None, *neutral)),
            (f"generation_config.{name}", getattr(config, name, None), (*unset, *neutral)),
        ):
            if not any(value is one or (isinstance(value, (int, float)) and value == one) for one in allowed):
                raise InvalidArgument(
                    f"{where}: got {value!r:.80}, allowed {neutral[0] if neutral else None!r}: logitd draws, see `sampling`"
                )
