"""`generate` of Hugging Face transformers, with logitd drawing the tokens.

    from logitd.transformers import generate
    tokens = generate(model, client, **inputs, seed=7, sampling=dict(temperature=0.8, top_p=0.9), max_new_tokens=50)

With `head=`, the model's own output head does not run: its hidden states go to the server, which has the head loaded.
With `assistant_model=`, a smaller model drafts tokens, and the server verifies them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import transformers

from logitd import _arrays
from logitd._generation import BY_PROCESSOR, DRAW, FIELDS, MODE, OUTPUT, sampling_of
from logitd.client import Client
from logitd.errors import InvalidArgument
from logitd.results import Head, Ragged, RowStatus, SampleResult, VerifyResult

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_WITH_HISTORY = (*_PENALTIES, "watermark_width")
_Penalty = transformers.RepetitionPenaltyLogitsProcessor
_EncoderPenalty = transformers.EncoderRepetitionPenaltyLogitsProcessor
_NO_LOGITS = "the model's logits are not on this side"
_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()  # of the hooks in models
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class _NoHead(torch.nn.Module):
    """In place of a model's output head: keeps the hidden states, and gives logits of 1, which take no memory. A ban or
    a penalty for some tokens shows in them; a penalty would not in logits of 0.

    writable: the logits take memory, for a caller that writes into them.
    """

    def __init__(self, vocab: int, writable: bool) -> None:
        super().__init__()
        self.vocab, self.writable = vocab, writable
        self.hidden: Optional[torch.Tensor] = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden.detach()
        ones = hidden.new_ones(()).expand(*hidden.shape[:-1], self.vocab)
        return ones.contiguous() if self.writable else ones


class _Hook:
    """In place of a model's _get_logits_processor: shows a sampler the processors that it comes with."""

    def __init__(self, make: Any) -> None:
        self.make, self.model = make, make.__self__
        self.users = 0

    def __call__(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        for one in kwargs.get("logits_processor") or ():
            if isinstance(one, Sampler):
                return one._take_over(
                    lambda config: self.make(config, *args, **kwargs), generation_config, kwargs["logits_processor"]
                )
        if isinstance(self.model.get_output_embeddings(), _NoHead):
            raise InvalidArgument("logits_processor: got no Sampler, allowed one that is attached: the model has no head")
        return self.make(generation_config, *args, **kwargs)


@contextlib.contextmanager
def _hooked(model: Any) -> Iterator[None]:
    """The hook is in the model. Calls in several threads share it, and the last one takes it out."""
    with _LOCK:
        hook = model._get_logits_processor  # of a wrapper, as PEFT's: that of its model
        if not isinstance(hook, _Hook):
            hook = _Hook(hook)
            hook.model._get_logits_processor = hook
        hook.users += 1
    try:
        yield
    finally:
        with _LOCK:
            hook.users -= 1
            if hook.users == 0:
                del hook.model._get_logits_processor


def get_head(client: Client, name: str) -> Head:
    """The server's head of this name. InvalidArgument: it has a final norm, which the model's hidden states are after."""
    head = client.get_head(name)
    if head.final_norm:
        raise InvalidArgument(
            f"head: got {name!r}, loaded with its final norm, which the model has done already; allowed is a head without"
        )
    return head


class Sampler(transformers.LogitsProcessor):
    """A LogitsProcessor that draws each row's next token with logitd, and leaves generate only that one.

    Use attached() around model.generate, with do_sample=False and without beams; generate() below sees to that. One
    sampler is for one call of generate.

    Other processors have their effect before it. With `head` there are no logits on this side: logitd then does
    repetition_penalty, or encoder_repetition_penalty if that is the only penalty, whether it comes as an argument, from a
    configuration or as a processor. Any other processor is refused.

    client: of the server that draws.
    seed: one for all rows, and row i then has seed + i; or one per row. A row's tokens are drawn at positions 0, 1, ...
    head: name of a loaded head.
    sampling: parameters of Client.sample, except seed, seeds, position, hidden, head and history. A repetition_penalty
        here stands in place of that of transformers. Penalties see the tokens that transformers' own would see: all so
        far, with the prompt, and with its padding in versions such as 4.57. Tokens outside the vocabulary are ignored,
        and a log line says how many.

    results: what Client.sample gave, step by step.
    """

    _writes = False  # whether generate writes into the logits

    def __init__(
        self,
        client: Client,
        *,
        seed: Union[int, Sequence[int]],
        head: Optional[str] = None,
        sampling: Optional[Mapping[str, Any]] = None,
    ) -> None:
        taken = {"seed", "seeds", "position", "hidden", "head", "history"} & set(sampling or {})
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
        self._sampling = {name: value for name, value in (sampling or {}).items() if value is not None}
        self._taken: Dict[str, Any] = {}  # parameters in place of processors
        self._unseen = np.zeros((), np.int64)  # tokens at the beginning of all rows, or of each, that penalties do not see
        self._encoder_ids: Optional[torch.Tensor] = None  # where not None: the tokens that they see
        self._head = None if head is None else get_head(client, head)
        self._no_head: Optional[_NoHead] = None

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator["Sampler"]:
        """Has model.generate show the sampler the other processors, and takes the model's output head out where the
        sampler has a head on the server: then the model is not for other use meanwhile."""
        with _hooked(model):
            if self._head is None:
                yield self
                return
            own = model.get_output_embeddings()
            width = model.config.get_text_config().hidden_size
            if width != self._head.hidden:
                raise InvalidArgument(
                    f"head: got {self._head.name!r} of hidden size {self._head.hidden}, allowed is the model's: {width}"
                )
            self._no_head = _NoHead(self._head.vocab, self._writes)
            model.set_output_embeddings(self._no_head)
            try:
                yield self
            finally:
                model.set_output_embeddings(own)
                self._no_head = None

    def _take_over(self, make: Callable[[Any], Any], config: Any, given: Sequence[Any]) -> Any:
        """The processors that make(config) gives, without those whose work logitd does. The sampler is the last.

        given: the caller's own, which are among them.
        """
        own = any(type(one) is _Penalty for one in given)  # stands in place of the one that transformers would make
        borrowed = not own and not FIELDS["repetition_penalty"].asks(config.repetition_penalty) and self._has_penalty()
        if own or borrowed:  # the latter because transformers' penalty knows which tokens it sees
            config = copy.copy(config)
            config.repetition_penalty = 1.0 if own else 2.0
        made = make(config)
        left = type(made)()
        for one in made:
            if type(one) is _Penalty:
                unseen = getattr(one, "prompt_ignore_length", None)
                self._unseen = _arrays.as_numpy("prompt_ignore_length", 0 if unseen is None else unseen)
            if one is self or self._does(one, borrowed):
                continue
            if self._head is not None:
                raise _refusal(one, config, given)
            left.append(one)
        left.append(self)
        for name in (name for name, field in FIELDS.items() if field.use == OUTPUT and self._head is not None):
            if FIELDS[name].asks(getattr(config, name, None)):
                raise InvalidArgument(f"{name}: got {getattr(config, name)!r:.80}, allowed False with a head: {_NO_LOGITS}")
        return left

    def _has_penalty(self) -> bool:
        return any(name in self._sampling for name in _PENALTIES)

    def _does(self, one: Any, borrowed: bool) -> bool:
        """True where logitd does the work of a processor."""
        kind = type(one)
        if kind is _Penalty and (borrowed or "repetition_penalty" in self._sampling):
            return True
        if self._head is None:
            return False
        if kind is transformers.LogitNormalization:
            return True  # it changes no draw
        if kind not in (_Penalty, _EncoderPenalty) or self._taken:
            return False
        if kind is _EncoderPenalty:
            if self._has_penalty():
                return False
            self._encoder_ids = one.encoder_input_ids
        self._taken = {"repetition_penalty": one.penalty}
        return True

    def _history(self, input_ids: torch.Tensor, vocab: int) -> Ragged[np.int64]:
        """The tokens that penalties and a watermark see."""
        ids = _arrays.as_numpy("input_ids", input_ids if self._encoder_ids is None else self._encoder_ids)
        seen = np.broadcast_to(np.arange(ids.shape[1]) >= np.reshape(self._unseen, (-1, 1)), ids.shape)
        known = seen & (ids >= 0) & (ids < vocab)
        outside = int(seen.sum() - known.sum())
        if outside and not self.results:
            _LOG.warning("history: ignored %d tokens of the prompts, which are outside 0 to %d", outside, vocab - 1)
        return Ragged(ids[known], known.sum(axis=1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[N, V]: 0 for the token drawn in each row, -inf for all others. ValueError: a row has no token to draw."""
        result = self._sample(input_ids, scores)
        self.results.append(result)
        _check_rows(result, len(scores))
        return _only(torch.as_tensor(result.tokens), scores)

    def _params(self, rows: int) -> Dict[str, Any]:
        params = {**self._sampling, **self._taken}
        params["seed"] = [self._seed + row for row in range(rows)] if isinstance(self._seed, int) else self._seed
        if len(params["seed"]) != rows:
            raise InvalidArgument(f"seed: got {len(params['seed'])} seeds, allowed one, or {rows} (rows)")
        return params

    def _hidden(self, rows: slice) -> torch.Tensor:
        """[N, rows, D], the model's last hidden states at these places, in the head's type."""
        if self._head is None or self._no_head is None or self._no_head.hidden is None:
            raise RuntimeError(
                "sampler: got a head but the model's own ran, allowed is generate within attached(model)"
            )
        return self._no_head.hidden[:, rows].to(TYPES[self._head.dtype])

    def _sample(self, input_ids: torch.Tensor, scores: torch.Tensor) -> SampleResult:
        params = self._params(len(scores))
        params["position"] = len(self.results)
        if any(name in params for name in _WITH_HISTORY):
            params["history"] = self._history(input_ids, scores.shape[1])
        if self._head is None:
            return self._client.sample(scores.float(), **params)
        hidden = self._hidden(slice(-1, None))[:, 0]
        if bool((scores != scores[:, :1]).any()):
            raise InvalidArgument(
                f"logits_processor: got one that changes logits, allowed none with a head: {_NO_LOGITS}; see `sampling`"
            )
        return self._client.sample(hidden=hidden, head=self._head.name, **params)


def _check_rows(result: SampleResult, rows: int) -> None:
    """ValueError: one of the first `rows` rows has no token."""
    (faulty,) = np.nonzero(~np.asarray(result.ok)[:rows])
    if len(faulty):
        row = int(faulty[0])
        raise ValueError(
            f"row {row}: {RowStatus(int(result.status[row])).name}, at token {int(result.status_position[row])}"
        )


def _only(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores, as `scores`, that leave only one token in each row."""
    index = tokens.to(device=scores.device, dtype=torch.int64)[:, None]
    return torch.full_like(scores, -torch.inf).scatter_(1, index, 0.0)


def _leading(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores, as `scores`, of which one token of each row is the greatest, with its probability under softmax(scores).

    transformers compares that probability with assistant_confidence_threshold. Below 1/V it becomes almost 1/V.
    """
    index = tokens.to(device=scores.device, dtype=torch.int64)[:, None]
    log_odds = scores.float().log_softmax(-1).gather(1, index).double().exp().logit()
    others = (-log_odds - math.log(max(scores.shape[1] - 1, 1))).clamp(max=-1e-3).to(scores.dtype)
    return others.expand_as(scores).scatter(1, index, 0.0)


class _Drafts:
    """In place of a model's candidate generator: tells a verifier which tokens are drafts."""

    def __init__(self, own: Any, verifier: "_Verifier") -> None:
        self._own, self._verifier = own, verifier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[torch.Tensor, None]:
        self._verifier._begin(input_ids)
        ids = self._own.get_candidates(input_ids, *args, **kwargs)[0]
        self._verifier._take_drafts(ids)
        return ids, None  # without their logits, transformers compares tokens


class _Verifier(Sampler):
    """A Sampler of one sequence, for generate with an assistant_model.

    transformers runs both models, and asks for a token at each draft and after the last one. At the first of them, all
    go to the server in one call of verify, as greedy drafts: the tokens are those of sample, with the same seed and
    positions, whatever the assistant. The assistant draws its drafts with the same seed and positions too, which makes
    them equal to the model's tokens as often as the two models agree.
    """

    _writes = True

    def __init__(self, client: Client, **options: Any) -> None:
        super().__init__(client, **options)
        self._others: Any = ()  # processors of logits, before the draw
        self._prompt: Optional[int] = None  # tokens
        self._known = 0  # tokens before the drafts
        self._candidates: Optional[torch.Tensor] = None  # [1, known + drafts]; None: the assistant is at work
        self._logits: Optional[torch.Tensor] = None  # [1, drafts + 1 or more, V]
        self._tokens = np.zeros(0, np.int32)  # those that hold, from the first draft on

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator["Sampler"]:
        make = model._get_candidate_generator  # of a wrapper, as PEFT's: that of its model
        owner = make.__self__

        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._logits = output.logits.detach()

        with super().attached(model):
            owner._get_candidate_generator = lambda *args, **kwargs: _Drafts(make(*args, **kwargs), self)
            handle = owner.register_forward_hook(keep)
            try:
                yield self
            finally:
                handle.remove()
                del owner._get_candidate_generator

    def _take_over(self, make: Callable[[Any], Any], config: Any, given: Sequence[Any]) -> Any:
        made = super()._take_over(make, config, given)
        self._others = type(made)(made[:-1])
        return type(made)([self])

    def _begin(self, input_ids: torch.Tensor) -> None:
        self._known = input_ids.shape[1]
        self._prompt = self._known if self._prompt is None else self._prompt
        self._candidates = None

    def _take_drafts(self, ids: torch.Tensor) -> None:
        self._candidates = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, V]: as Sampler, for the token after `input_ids`."""
        if self._candidates is None:
            drawn = self._draft(input_ids, scores)
            return _leading(torch.as_tensor(drawn.tokens), scores) if bool(drawn.ok.all()) else scores
        place = input_ids.shape[1] - self._known
        if place == 0:
            result = self._verify(self._candidates.to(scores.device), scores.shape[1])
            self.results.append(result)
            count = int(result.accepted[0]) + 1
            _check_rows(result, count)
            self._tokens = np.asarray(result.tokens)[:count]
        # After the bonus token nothing is read: it differs from the draft there.
        token = self._tokens[min(place, len(self._tokens) - 1)]
        return _only(torch.tensor([int(token)]), scores)

    def _draft(self, input_ids: torch.Tensor, scores: torch.Tensor) -> SampleResult:
        params = self._params(len(scores))
        params["position"] = input_ids.shape[1] - (self._prompt or 0)
        if any(name in params for name in _WITH_HISTORY):
            params["history"] = self._history(input_ids, scores.shape[1])
        return self._client.sample(scores.float(), **params)

    def _verify(self, ids: torch.Tensor, vocab: int) -> VerifyResult:
        first = self._known - (self._prompt or 0)
        lengths = range(self._known, ids.shape[1] + 1)
        params = self._params(1)
        params["seed"] = params["seed"] * len(lengths)
        params["position"] = [first + i for i in range(len(lengths))]
        if any(name in params for name in _WITH_HISTORY):
            seen = [self._history(ids[:, :length], vocab) for length in lengths]
            params["history"] = [one.values for one in seen]
        params.update(sequence_rows=[len(lengths)], drafts=ids[0, self._known :].tolist())
        if self._head is not None:
            hidden = self._hidden(slice(-len(lengths), None))[0]
            return self._client.verify(hidden=hidden, head=self._head.name, **params)
        assert self._logits is not None
        rows = self._logits[0, -len(lengths) :].to(ids.device, torch.float32)
        if self._others:
            rows = torch.cat([self._others(ids[:, :n], rows[i : i + 1].clone()) for i, n in enumerate(lengths)])
        return self._client.verify(rows, **params)


def _refusal(one: Any, config: Any, given: Sequence[Any]) -> InvalidArgument:
    """With a head, of a processor: the name of the argument that it comes from."""
    kind = type(one).__name__
    name = "logits_processor" if any(one is other for other in given) else BY_PROCESSOR.get(kind, "logits_processor")
    if name == "min_length" and FIELDS["min_new_tokens"].asks(config.min_new_tokens):
        name = "min_new_tokens"  # of which transformers makes a min_length
    off = FIELDS[name].off[:1] if name in FIELDS else ()
    got = f"{getattr(config, name)!r:.80}" if hasattr(config, name) else kind
    beside = ", or as the only penalty" if isinstance(one, (_Penalty, _EncoderPenalty)) else ""
    return InvalidArgument(
        f"{name}: got {got}, allowed {off[0] if off else None}{beside} with a head: {_NO_LOGITS}; see `sampling`"
    )


def generate(
    model: Any,
    client: Client,
    *args: Any,
    seed: Union[int, Sequence[int]],
    head: Optional[str] = None,
    sampling: Union[Mapping[str, Any], transformers.GenerationConfig, None] = None,
    **kwargs: Any,
) -> Any:
    """model.generate(*args, **kwargs), with tokens drawn by logitd. Sampler has seed, head and sampling.

    sampling: or a GenerationConfig in place of `generation_config`. Its draw is done by logitd, with parameters of the
        same meaning (_generation.sampling_of), and the rest by transformers.
    assistant_model: among kwargs, a smaller model of the same tokenizer that drafts tokens; one sequence. The server
        verifies them, so the tokens are those without it, for the same seed, up to the rounding of the model's own sums.
        The model is not for other use meanwhile.

    InvalidArgument: arguments, also of a `generation_config`, that leave the choice of tokens to transformers, such as
    do_sample, num_beams, temperature or typical_p; or num_return_sequences: repeat rows of the prompt instead. What the
    model's own generation_config says of them does not count. With a head: logits in the output, and what works on
    logits, wherever it comes from; except that logitd does a repetition_penalty. A repetition_penalty here and another
    one in `sampling`.
    """
    if len(args) > 1:  # as model.generate has them
        args, kwargs = (args[0], *args[2:]), {"generation_config": args[1], **kwargs}
    given = list(kwargs.pop("logits_processor", None) or [])
    if isinstance(sampling, transformers.GenerationConfig):
        if kwargs.get("generation_config") is not None:
            raise InvalidArgument("generation_config: got one beside that of sampling, allowed one of them")
        kwargs["generation_config"], sampling = _divided(sampling, getattr(model, "generation_config", None))
    _check_choice(kwargs)
    _check_penalty(kwargs, given, (sampling or {}).get("repetition_penalty"))
    if kwargs.get("assistant_model") is model:
        raise InvalidArgument(f"assistant_model: got {model!r:.80}, allowed another than the model itself")
    assisted = FIELDS["assistant_model"].asks(kwargs.get("assistant_model"))
    sampler = (_Verifier if assisted else Sampler)(client, seed=seed, head=head, sampling=sampling)
    own = getattr(model, "generation_config", None)
    modes = {name: field for name, field in FIELDS.items() if field.use == MODE and field.asks(getattr(own, name, None))}
    ours = {name: field.off[0] if field.off else None for name, field in modes.items()}
    ours.update(do_sample=False, num_beams=1, num_return_sequences=1)
    with sampler.attached(model):
        return model.generate(
            *args, **{**kwargs, **ours}, logits_processor=transformers.LogitsProcessorList([*given, sampler])
        )


def _divided(config: Any, own: Any) -> Tuple[Any, Dict[str, Any]]:
    """A GenerationConfig as that of the part that transformers does, and the parameters of Client.sample."""
    params = sampling_of(config, own)
    rest, plain = copy.deepcopy(config), transformers.GenerationConfig()
    for name in (name for name, field in FIELDS.items() if field.chooses):
        if hasattr(rest, name):
            setattr(rest, name, getattr(plain, name, None))
    return rest, params


def _stated(kwargs: Mapping[str, Any], name: str) -> List[Tuple[str, Any]]:
    """The caller's value of a field, and its origin."""
    config = kwargs.get("generation_config")
    value = getattr(config, name, None)
    default = getattr(transformers.GenerationConfig(), name, None)  # of top_k it is 50 in some versions
    return [(name, kwargs.get(name)), (f"generation_config.{name}", None if value == default else value)]


def _check_choice(kwargs: Mapping[str, Any]) -> None:
    config = kwargs.get("generation_config")
    if not isinstance(config, (transformers.GenerationConfig, type(None))):
        raise InvalidArgument(f"generation_config: got {config!r:.80}, allowed a transformers.GenerationConfig")
    for name in (name for name, field in FIELDS.items() if field.use in (MODE, DRAW)):
        for where, value in _stated(kwargs, name):
            if FIELDS[name].asks(value):
                allowed = FIELDS[name].off[0] if FIELDS[name].off else None
                raise InvalidArgument(f"{where}: got {value!r:.80}, allowed {allowed!r}: logitd draws, see `sampling`")


def _check_penalty(kwargs: Mapping[str, Any], given: Sequence[Any], sampled: Any) -> None:
    """InvalidArgument: the caller states two different repetition penalties."""
    if sampled is None:
        return
    wanted = _arrays.numbers("repetition_penalty", sampled, np.dtype(np.float32))
    stated = _stated(kwargs, "repetition_penalty")
    stated += [("logits_processor", one.penalty) for one in given if type(one) is _Penalty]
    for where, value in stated:
        if FIELDS["repetition_penalty"].asks(value) and not bool((wanted == np.float32(value)).all()):
            raise InvalidArgument(
                f"{where}: got a repetition_penalty of {value!r:.80} beside {sampled!r:.80} in sampling, allowed in one "
                "of them"
            )
