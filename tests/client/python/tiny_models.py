"""Small causal language models with random weights, for tests. They need torch and transformers."""

import torch
import transformers


def tiny(kind=transformers.LlamaConfig, seed=3, **more):
    """A model in evaluation mode, whose logits differ enough for tokens to be certain."""
    torch.manual_seed(seed)
    config = kind(
        **{
            "vocab_size": 311,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
            "initializer_range": 0.4,
            **more,
        }
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()
