"""The arguments of transformers' generate that have to do with logits or the choice of tokens, and who does each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Tuple

# How a token is chosen, which is for logitd: refused from a caller, and turned off where a model's configuration has it.
MODE = "mode"
# A MODE that is off by itself without do_sample.
DRAW = "draw"
# A penalty that logitd has too. With a head, or if `sampling` has it, logitd does it, and transformers does not.
PENALTY = "penalty"
# Work on logits for which logitd has no parameter. Refused with a head, because then there are no logits.
LOGITS = "logits"
# Work on logits that changes no draw. With a head nobody does it.
NO_DRAW = "no draw"
# Logits in what generate returns. Refused with a head.
OUTPUT = "output"


@dataclass(frozen=True)
class Field:
    """An argument of generate, most of them also in GenerationConfig."""

    use: str
    off: Tuple[Any, ...] = ()  # values besides None that ask for nothing
    processors: Tuple[str, ...] = ()  # classes of transformers that do it
    on: Tuple[Any, ...] = ()  # where not empty: the values that ask for something, in place of `off`

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something."""
        if self.on:
            return isinstance(value, type(self.on[0])) and value in self.on
        return not any(value is one or (isinstance(value, (int, float)) and value == one) for one in (None, *self.off))


# All such arguments of transformers 4.45 to 5. Those that are missing here have nothing to do with logits.
FIELDS: Dict[str, Field] = {
    "do_sample": Field(MODE, (False,)),
    "num_beams": Field(MODE, (1,)),
    "num_beam_groups": Field(MODE, (1,)),
    "num_return_sequences": Field(MODE, (1,)),
    "temperature": Field(DRAW, (1.0,), ("TemperatureLogitsWarper",)),
    "top_k": Field(DRAW, (0, -1), ("TopKLogitsWarper",)),
    "top_p": Field(DRAW, (1.0,), ("TopPLogitsWarper",)),
    "min_p": Field(DRAW, (0.0,), ("MinPLogitsWarper",)),
    "top_h": Field(DRAW, (), ("TopHLogitsWarper",)),
    "typical_p": Field(DRAW, (1.0,), ("TypicalLogitsWarper",)),
    "epsilon_cutoff": Field(DRAW, (0.0,), ("EpsilonLogitsWarper",)),
    "eta_cutoff": Field(DRAW, (0.0,), ("EtaLogitsWarper",)),
    "penalty_alpha": Field(MODE, (0.0,)),
    "diversity_penalty": Field(MODE, (0.0,), ("HammingDiversityLogitsProcessor",)),
    "dola_layers": Field(MODE),
    "constraints": Field(MODE),
    "force_words_ids": Field(MODE),
    "prompt_lookup_num_tokens": Field(MODE),
    "assistant_early_exit": Field(MODE),
    "assistant_model": Field(MODE),
    "use_mtp": Field(MODE, (False,)),
    "token_healing": Field(MODE, (False,)),
    "custom_generate": Field(MODE),
    "cache_implementation": Field(MODE, on=("paged",)),  # generate_batch, which draws by itself
    "repetition_penalty": Field(PENALTY, (1.0,), ("RepetitionPenaltyLogitsProcessor",)),
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
}
BY_PROCESSOR: Dict[str, str] = {kind: name for name, field in FIELDS.items() for kind in field.processors}
