"""Every argument of transformers' generate and every field of its GenerationConfig, and who does each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from logitd.errors import InvalidArgument

# How a token is chosen, which is for logitd: refused from a caller, and turned off where a model's configuration has it.
MODE = "mode"
# A MODE that is off by itself without do_sample. `parameter` names the parameter of Client.sample that does it.
DRAW = "draw"
# Speculative decoding, with the drafts verified by logitd.
DRAFT = "draft"
# A penalty that logitd has too. With a head, or if `sampling` has it, logitd does it, and transformers does not.
PENALTY = "penalty"
# Work on logits for which logitd has no parameter. Refused with a head, because then there are no logits.
LOGITS = "logits"
# Work on logits that changes no draw. With a head nobody does it.
NO_DRAW = "no draw"
# Logits in what generate returns. Refused with a head.
OUTPUT = "output"
# Lengths, stops, caches and outputs: transformers does them, also with logitd.
OTHER = "other"


@dataclass(frozen=True)
class Field:
    """An argument of generate, most of them also in GenerationConfig."""

    use: str
    off: Tuple[Any, ...] = ()  # values besides None that ask for nothing
    processors: Tuple[str, ...] = ()  # classes of transformers that do it
    on: Tuple[Any, ...] = ()  # where not empty: the values that ask for something, in place of `off`
    parameter: Optional[str] = None  # of Client.sample

    @property
    def chooses(self) -> bool:
        """True where it says how a token is drawn, which is for logitd."""
        return self.use in (MODE, DRAW) or self.parameter is not None

    def asks(self, value: Any) -> bool:
        """True where a value asks for something."""
        if self.on:
            return isinstance(value, type(self.on[0])) and value in self.on
        return not any(value is one or (isinstance(value, (int, float)) and value == one) for one in (None, *self.off))


_OTHERS = """
    max_length max_new_tokens early_stopping max_time stop_strings length_penalty
    use_cache cache_config max_cache_len return_legacy_cache prefill_chunk_size
    output_attentions output_hidden_states return_dict_in_generate low_memory
    pad_token_id bos_token_id eos_token_id decoder_start_token_id
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    max_matching_ngram_size assistant_lookbehind target_lookbehind speculation_type
    compile_config disable_compile continuous_batching_config transformers_version
    forced_decoder_ids generation_kwargs
""".split()

# All of transformers 4.45 to 5.
FIELDS: Dict[str, Field] = {
    "do_sample": Field(MODE, (False,)),
    "num_beams": Field(MODE, (1,)),
    "num_beam_groups": Field(MODE, (1,)),
    "num_return_sequences": Field(MODE, (1,)),
    "temperature": Field(DRAW, (1.0,), ("TemperatureLogitsWarper",), parameter="temperature"),
    "top_k": Field(DRAW, (0, -1), ("TopKLogitsWarper",), parameter="top_k"),
    "top_p": Field(DRAW, (1.0,), ("TopPLogitsWarper",), parameter="top_p"),
    "min_p": Field(DRAW, (0.0,), ("MinPLogitsWarper",), parameter="min_p"),
    "top_h": Field(DRAW, (), ("TopHLogitsWarper",)),
    "typical_p": Field(DRAW, (1.0,), ("TypicalLogitsWarper",), parameter="typical_p"),
    "epsilon_cutoff": Field(DRAW, (0.0,), ("EpsilonLogitsWarper",)),
    "eta_cutoff": Field(DRAW, (0.0,), ("EtaLogitsWarper",)),
    "penalty_alpha": Field(MODE, (0.0,)),
    "diversity_penalty": Field(MODE, (0.0,), ("HammingDiversityLogitsProcessor",)),
    "dola_layers": Field(MODE),
    "constraints": Field(MODE),
    "force_words_ids": Field(MODE),
    "prompt_lookup_num_tokens": Field(MODE),
    "assistant_early_exit": Field(MODE),
    "assistant_ensemble_weight": Field(MODE),
    "assistant_tokenizer": Field(MODE),
    "assistant_model": Field(DRAFT),
    "use_mtp": Field(MODE, (False,)),
    "token_healing": Field(MODE, (False,)),
    "custom_generate": Field(MODE),
    "cache_implementation": Field(MODE, on=("paged",)),  # generate_batch, which draws by itself
    "repetition_penalty": Field(PENALTY, (1.0,), ("RepetitionPenaltyLogitsProcessor",), parameter="repetition_penalty"),
    "encoder_repetition_penalty": Field(PENALTY, (1.0,), ("EncoderRepetitionPenaltyLogitsProcessor",)),
    "sequence_bias": Field(LOGITS, (), ("SequenceBiasLogitsProcessor",)),
    "bad_words_ids": Field(LOGITS, (), ("NoBadWordsLogitsProcessor",)),
    "suppress_tokens": Field(LOGITS, (), ("SuppressTokensLogitsProcessor",)),
    "begin_suppress_tokens": Field(LOGITS, (), ("SuppressTokensAtBeginLogitsProcessor",)),
    "forced_bos_token_id": Field(LOGITS, (), ("ForcedBOSTokenLogitsProcessor",)),
    "forced_eos_token_id": Field(LOGITS, (), ("ForcedEOSTokenLogitsProcessor",)),
    "no_repeat_ngram_size": Field(LOGITS, (0,), ("NoRepeatNGramLogitsProcessor",)),
    "encoder_no_repeat_ngram_size": Field(LOGITS, (0,), ("EncoderNoRepeatNGramLogitsProcessor",)),
    "min_length": Field(LOGITS, (0,), ("MinLengthLogitsProcessor",)),
    "min_new_tokens": Field(LOGITS, (0,), ("MinNewTokensLengthLogitsProcessor",)),
    "exponential_decay_length_penalty": Field(LOGITS, (), ("ExponentialDecayLengthPenalty",)),
    "prefix_allowed_tokens_fn": Field(LOGITS, (), ("PrefixConstrainedLogitsProcessor",)),
    "guidance_scale": Field(
        LOGITS,
        (1.0,),
        (
            "UnbatchedClassifierFreeGuidanceLogitsProcessor",
            "ClassifierFreeGuidanceLogitsProcessor",
            "DiaClassifierFreeGuidanceLogitsProcessor",
        ),
    ),
    "watermarking_config": Field(LOGITS, (), ("WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")),
    "remove_invalid_values": Field(LOGITS, (False,), ("InfNanRemoveLogitsProcessor",)),
    "renormalize_logits": Field(NO_DRAW, (False,), ("LogitNormalization",)),
    "output_scores": Field(OUTPUT, (False,)),
    "output_logits": Field(OUTPUT, (False,)),
    **dict.fromkeys(_OTHERS, Field(OTHER)),
}
BY_PROCESSOR: Dict[str, str] = {kind: name for name, field in FIELDS.items() for kind in field.processors}


_TOP_K = 50  # transformers' own, where neither a configuration nor the model's says another


def sampling_of(config: Any, own: Any = None) -> Dict[str, Any]:
    """The parameters of Client.sample that draw as generate does with a transformers.GenerationConfig.

    Without do_sample that is temperature 0 and the penalty. With it, a field that is None is that of `own`, the model's
    generation_config, and then off; top_k is then 50, as in generate. 0 turns it off.

    InvalidArgument: a field that changes tokens and has no such parameter (top_h, epsilon_cutoff, eta_cutoff, beams and
    other modes); min_p beside top_p, which generate does in another order. Work on logits, such as
    no_repeat_ngram_size, has no parameter either, and is left to generate.
    """

    def value_of(name: str) -> Any:
        value = getattr(config, name, None)
        return getattr(own, name, None) if value is None else value

    draws = bool(value_of("do_sample"))
    params: Dict[str, Any] = {} if draws else {"temperature": 0.0}
    for name, field in FIELDS.items():
        value = _TOP_K if name == "top_k" and value_of(name) is None else value_of(name)
        if name == "do_sample" or not field.asks(value) or (field.use == DRAW and not draws):
            continue
        if field.parameter is not None:
            params[field.parameter] = value
        elif field.use in (MODE, DRAW):
            allowed = field.off[0] if field.off else None
            raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {allowed!r}: logitd has no parameter for it")
    if "min_p" in params and "top_p" in params:
        raise InvalidArgument(
            f"min_p: got {params['min_p']!r:.80} beside a top_p of {params['top_p']!r:.80}, allowed one of them: logitd does "
            "min_p first, and transformers top_p"
        )
    return params
