"""The keyword parameters of calls, for type checkers. The proto files have the exact meaning and the limits.

"Per row": one value for all rows, or an array of N values. V is the vocabulary, D the hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Mapping, Optional, Protocol, Sequence, TypedDict, Union

import numpy as np

from logitd.results import Ragged

if TYPE_CHECKING:
    from logitd.arena import Arena, CudaArena



class Tensor(Protocol):
    """A torch tensor, also to a type checker that has no torch."""

    def detach(self) -> Any: ...

    def cpu(self) -> Any: ...


Array = Union["np.ndarray[Any, Any]", Tensor]
Float = Union[float, "np.floating[Any]", "np.integer[Any]"]
Int = Union[int, "np.integer[Any]"]
Floats = Union[Float, Sequence[Float], Array]
Ints = Union[Int, Sequence[Int], Array]
TokenLists = Union[Sequence[Int], Sequence[Sequence[Int]], Sequence[Array], Array, "Ragged[Any]"]
"""Token ids: one list for all rows, or a list per row (also as a 2-D array)."""
Probabilities = Union[Float, Sequence[Float], Sequence[Sequence[Float]], Sequence[Array], Array, "Ragged[Any]"]
"""One after another, or a list per draft."""
DType = Literal["f32", "f16", "bf16"]
LogprobMode = Literal["raw", "processed", "tempered"]
Smoothing = Literal["torch", "megatron"]
DraftKind = Literal["greedy", "list", "dense"]
Biases = Union[Mapping[int, Float], Sequence[Optional[Mapping[int, Float]]]]


class InputParams(TypedDict, total=False):
    """What stands in place of logits, where they lie, and the deadline."""

    hidden: Optional[Array]
    """[N, D] or [D], hidden states for `head`, in the type of its weight."""
    head: Optional[str]
    """Name of a head that the server has loaded."""
    head_version: Optional[int]
    """The version the head must have, or FailedPrecondition; None: any. Results say the version that served."""
    dtype: Optional[DType]
    """Only for bf16 bits in a uint16 array: "bf16"."""
    arena: Union[Arena, CudaArena, None]
    """The arena in which the logits or hidden states lie, so that they are named and not sent: a contiguous array, or
    rows at equal distances. InvalidArgument: they do not lie there, or not so."""
    deadline: Optional[float]
    """Seconds for the call, all attempts and waits included; None: the client's."""


class TopKParams(InputParams, total=False):
    """Parameters of top_k."""

    temperature: Floats
    """Per row. Divides the logits; above 0; default 1."""


class SamplingParams(TypedDict, total=False):
    """Parameters of sample, sample_stream and verify."""

    seed: Ints
    """Per row, 0 to 2^64-1. Equal rows with the same seed and position draw the same token, so one seed for all rows
    draws equal rows alike: give one per row, or `seeds`. One of the two is required, unless every row has temperature 0, or a
    watermark without xtc_probability."""
    seeds: Int
    """In place of seed: one number, 0 to 2^64-1, from which each row gets a seed of its own: row i the output i of
    SplitMix64 started at the number. docs/semantics.md has the formula."""
    position: Ints
    """Per row, 0 to 2^64-1. Place in the seed's sequence, e.g. the tokens drawn so far; default 0."""
    temperature: Floats
    """Per row, 0 or more. 0 takes the highest logit; default 1."""
    top_k: Ints
    """Per row. Keeps the k highest logits; 0, -1, and V or more keep all; default 0."""
    top_p: Floats
    """Per row, above 0, to 1. Keeps the fewest tokens whose mass reaches p; default 1."""
    top_n_sigma: Floats
    """Per row, 0 or more. Drops tokens whose logit is more than n standard deviations of the row's logits below the
    highest; 0 is off; default 0."""
    typical_p: Floats
    """Per row, above 0, to 1. Keeps the tokens whose -ln p is nearest to the entropy, until their mass reaches it;
    default 1."""
    xtc_threshold: Floats
    """Per row, 0 to 1. The share of the mass from which xtc_probability removes tokens; default 0.1."""
    xtc_probability: Floats
    """Per row, 0 to 1. The chance to remove all tokens from xtc_threshold up but the least probable; default 0."""
    min_p: Floats
    """Per row, 0 to 1. Drops tokens below this share of the highest probability; default 0."""
    repetition_penalty: Floats
    """Per row, above 0. Scales down logits of tokens in the history; default 1."""
    presence_penalty: Floats
    """Per row. Subtracted from the logits of tokens in the history; default 0."""
    frequency_penalty: Floats
    """Per row. Subtracted from a logit for each time its token occurs; default 0."""
    top_logprobs: Ints
    """Per row, 0 to min(1024, V). Most probable tokens to report; default 0."""
    logprob_mode: Union[LogprobMode, Sequence[LogprobMode]]
    """Per row. Log-probabilities of the row as sent ("raw"), after every step ("processed"), or as sent and divided by
    the temperature ("tempered"); default "raw"."""
    history: TokenLists
    """Tokens so far, the last one last; penalties and watermarks use them."""
    prompt_tokens: Ints
    """Per row. How many of the history's first tokens are the prompt, which presence_penalty and frequency_penalty do
    not count; default 0."""
    logit_bias: Biases
    """{token id: bias} for all rows, or one dict (or None) per row. Added to the logit; -inf bans the token."""
    extra_ids: TokenLists
    """Token ids whose log-probabilities to report."""
    allowed_tokens: Union[Sequence[bool], Sequence[Sequence[bool]], Array]
    """bool [V] or [M, V], True where a token is allowed; or words [M, ceil(V / 32)] of uint32 or int32, least
    significant bit first."""
    allowed_tokens_mask: Ints
    """Per row, which of the M masks holds; -1: every token is allowed. Not needed where M is 1 or N."""
    want_rank: Union[bool, Sequence[bool], Array]
    """Per row. Report the token's rank; default False."""
    want_support: Ints
    """Per row, 0 to min(1024, V). Report at most so many of the tokens that can be drawn; default 0."""
    want_entropy: Union[bool, Sequence[bool], Array]
    """Per row. Report the entropies of the distribution drawn from and of the row as sent; default False."""
    draws: Ints
    """Per row, 0 to 1024. Tokens to draw of the row, independently of each other; default 0, which is one token that
    only `tokens` has. Not for verify."""
    watermark_key: Ints
    """Per row, 0 to 2^64-1. Key of the watermark; with the last watermark_width tokens of the history it takes the place
    of the random bits. logitd.watermark finds it again."""
    watermark_width: Ints
    """Per row, 0 to 16. Tokens of the history that the watermark depends on; 0 is no watermark; default 0."""


class SampleParams(InputParams, SamplingParams, total=False):
    """Parameters of sample, and of sample_stream's write."""


class VerifyParams(InputParams, SamplingParams, total=False):
    """Parameters of verify."""


class ScoreParams(InputParams, total=False):
    """Parameters of score and score_stream."""

    ignore_index: int
    """Target of rows that are not counted; default -100."""
    temperature: Floats
    """Per row. Divides the logits; above 0; default 1."""
    softcap: Floats
    """Per row. Caps the logits: softcap * tanh(logit / softcap); 0 is off. Only with logits: a head has its own."""
    label_smoothing: Floats
    """Per row, 0 to below 1. Mass taken from the target; default 0."""
    smoothing: Union[Smoothing, Sequence[Smoothing]]
    """Per row. The mass goes to all tokens ("torch") or to the others ("megatron"); default "torch"."""
    z_loss: Floats
    """Per row, 0 or more. Adds z_loss * logsumexp^2 to the loss; default 0."""
    top_logprobs: Ints
    """Per row, 0 to min(128, V). Most probable tokens to report; default 0."""
    extra_ids: TokenLists
    """Token ids whose log-probabilities to report."""
    support_ids: TokenLists
    """Token ids, at most 1024 per row, that the row's softmax is over, with the target among them; none: all tokens.
    The support_ids of a SampleResult are taken as they are."""
    want_rank: bool
    """Report the rank of every target."""
    want_entropy: bool
    """Report the entropy of every row."""
    skip_ignored: bool
    """Leave ignored rows out: not computed, and their numbers are 0."""


class DivergenceParams(InputParams, total=False):
    """Parameters of divergence and divergence_stream."""

    reference_hidden: Optional[Array]
    """[N, D] or [D], hidden states for `reference_head`, in the type of its weight; in place of reference_logits."""
    reference_head: Optional[str]
    """Name of a loaded head of the same vocabulary; may be `head` itself."""
    reference_head_version: Optional[int]
    """As head_version, of reference_head."""
    reference_dtype: Optional[DType]
    """As dtype, of the reference."""
    reference_arena: Union[Arena, CudaArena, None]
    """As arena, of the reference."""
    ignore_index: int
    """Target of rows that are not counted; default -100."""
    temperature: Floats
    """Per row. Divides the logits; above 0; default 1."""
    reference_temperature: Floats
    """Per row. Divides the reference's logits; above 0; default 1."""
    top_logprobs: Ints
    """Per row, 0 to min(1024, V). Most probable tokens of p to report; default 0."""
    reference_top_logprobs: Ints
    """Per row, 0 to min(1024, V). Most probable tokens of q to report; default 0."""


def split(params: Mapping[str, Any], *names: str) -> "tuple[list[Any], dict[str, Any]]":
    """The values of `names`, None where absent, and the other parameters."""
    rest = dict(params)
    return [rest.pop(name, None) for name in names], rest
