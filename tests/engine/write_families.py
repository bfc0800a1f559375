#!/usr/bin/env python3
"""Writes families_4.json or families_5.json: what transformers 4 or 5, whichever is installed, saves of the heads of its
causal models, and the logits that it computes.

    write_families.py [--check] [FAMILY...]

For every family, transformers makes a tiny model with random weights, saves it and runs it. The file has the saved
config.json, names and shapes of the saved tensors outside the layers, the values of those that a head may need, the
last hidden states and the logits; and for every model_type whether its embeddings are tied where that is not stated.
--check compares with the file instead: names, shapes, settings and defaults of today's transformers must be those of the
file. Needs torch and transformers; exits with 77 without them.
"""

import argparse
import base64
import json
import os
import pathlib
import re
import sys
import tempfile
import warnings

HERE = pathlib.Path(__file__).resolve().parent

# By model_type. The value changes settings from their defaults, so that a scale or a cap shows.
WANTED = {
    "afmoe": {}, "apertus": {}, "arcee": {}, "bart": {}, "bert": {"is_decoder": True}, "biogpt": {}, "bloom": {},
    "cohere": {"logit_scale": 0.25}, "cohere2": {"logit_scale": 0.25}, "ctrl": {}, "deepseek_v3": {}, "ernie4_5": {},
    "falcon": {}, "falcon_h1": {"lm_head_multiplier": 0.5}, "falcon_mamba": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {},
    "glm": {}, "glm4": {}, "gpt2": {}, "gpt_bigcode": {}, "gpt_neo": {}, "gpt_neox": {}, "gpt_neox_japanese": {}, "gpt_oss": {},
    "gptj": {}, "granite": {"logits_scaling": 4.0}, "granitemoe": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 4.0}, "inkling_text": {"logits_mup_width_multiplier": 4.0}, "llama": {}, "mamba": {},
    "mamba2": {}, "minicpm3": {}, "ministral3": {}, "mistral": {}, "mixtral": {}, "modernbert-decoder": {},
    "mpt": {}, "nanochat": {}, "nemotron": {}, "nemotron_h": {}, "olmo": {}, "olmo2": {}, "olmo3": {}, "openai-gpt": {},
    "opt": {}, "persimmon": {}, "phi": {}, "phi3": {}, "phimoe": {}, "qwen2": {}, "qwen2_moe": {}, "qwen3": {},
    "qwen3_moe": {}, "qwen3_next": {}, "qwen3_5_text": {}, "recurrent_gemma": {"logits_soft_cap": 5.0},
    "roberta": {"is_decoder": True}, "rwkv": {}, "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {},
    "vaultgemma": {}, "xglm": {}, "xlnet": {},
}
# Multimodal models: the class, and the settings of the text and the vision model.
NESTED = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model"),
    "llava": ("LlavaForConditionalGeneration", "llama", "clip_vision_model"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "pixtral"),
    "paligemma": ("PaliGemmaForConditionalGeneration", "gemma", "siglip_vision_model"),
}
# One layer of it is not enough for transformers 4.
NOT_IN_4 = ("qwen3_next",)
VOCAB, HIDDEN = 24, 16
# What makes a model tiny, where its configuration knows the key.
TINY = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "n_embd": HIDDEN, "d_model": HIDDEN, "dim": HIDDEN,
    "word_embed_proj_dim": HIDDEN, "num_hidden_layers": 1, "n_layer": 1, "n_layers": 1, "num_layers": 1,
    "decoder_layers": 1, "encoder_layers": 1, "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2,
    "decoder_attention_heads": 2, "encoder_attention_heads": 2, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8,
    "intermediate_size": 32, "ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32, "n_inner": 32, "d_inner": 32, "dff": 32,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2, "num_local_experts": 2,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64,
    "n_positions": 64, "n_ctx": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 4,
    "attention_types": [[["global"], 1]], "attention_layers": ["global"], "lru_width": HIDDEN, "state_size": 4,
    "attention_hidden_size": HIDDEN, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "query_pre_attn_scalar": 8, "max_seq_len": 64, "attn_dropout": 0.0, "first_k_dense_replace": 0,
    "time_step_rank": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 4,
    "mamba_n_groups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
VISION = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
          "patch_size": 4, "projection_dim": HIDDEN}
LAYER = re.compile(r"\.\d+\.")
HEAD = re.compile(r"(lm_head|embed_out|output_projection|head|wte|word_embeddings|embed_tokens|embed_in|embeddings|tokens_embed|w|"
                  r"lm_loss|word_embedding)\.(weight|bias)$|final_logits_bias$")


def packed(tensor):
    import torch

    return base64.b64encode(tensor.detach().to(torch.float32).contiguous().numpy().tobytes()).decode()


def causal_model(name, changes):
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = transformers.AutoConfig.for_model(name).__class__
    known = set(transformers.AutoConfig.for_model(name).to_dict())
    arguments = {key: value for key, value in TINY.items() if key in known or key in config_class.attribute_map}
    for key in ("layer_types", "layers_block_type", "block_types", "hybrid_layer_ids", "mlp_layer_types"):
        default = getattr(transformers.AutoConfig.for_model(name), key, None)
        if isinstance(default, (list, tuple)) and key in known and key != "block_types" and key != "hybrid_layer_ids":
            arguments[key] = [default[-1] if key == "layer_types" else default[0]]
    arguments.update(TWEAKS.get(name, {}))
    arguments.update(changes)
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])(config_class(**arguments))


def nested_model(name):
    import transformers

    model_class, *types = NESTED[name]
    inner = []
    for model_type, sizes in zip(types, ({**TINY, "layer_types": ["full_attention"]}, VISION)):
        known = transformers.AutoConfig.for_model(model_type).to_dict()
        inner.append({"model_type": model_type, **{key: value for key, value in sizes.items() if key in known}})
    config_class = transformers.AutoConfig.for_model(name).__class__
    return getattr(transformers, model_class)(config_class(text_config=inner[0], vision_config=inner[1]))


def family(name):
    import torch
    from safetensors import safe_open

    torch.manual_seed(7)
    model = (nested_model(name) if name in NESTED else causal_model(name, WANTED[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # a bias of zeros would hide whether it is added
            if not parameter.any() or parameter.std() < 0.3:
                parameter.uniform_(-1, 1)
    states = []
    base = model.model if model.base_model is model else model.base_model
    for module in (base, getattr(base, "decoder", None)):
        if module is not None:  # the outermost that runs is the last to be recorded
            module.register_forward_hook(lambda _, __, output: states.append(output[0]))
    ids = torch.tensor([[3, 9, 4]])
    with torch.no_grad():
        logits = model(ids).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with open(f"{folder}/config.json", encoding="utf-8") as file:
            saved = json.load(file)
        tensors, values = {}, {}
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            for key in sorted(file.keys()):
                if LAYER.search(key):
                    continue
                tensor = file.get_tensor(key)
                tensors[key] = list(tensor.shape)
                if HEAD.search(key) and tensor.numel() <= 4 * VOCAB * HIDDEN:
                    values[key] = packed(tensor)
    saved.pop("_name_or_path", None)
    return {"config": saved, "tensors": tensors, "values": values, "rows": logits.shape[1],
            "hidden": packed(states[-1][0]), "logits": packed(logits[0])}


# Settings that the tiny shape above does not fit.
TWEAKS = {
    "deepseek_v3": {"head_dim": 4},
    "falcon": {"new_decoder_architecture": False},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    "minicpm3": {"dim_model_base": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"num_hidden_layers": 2},
    "nemotron_h": {"layers_block_type": ["attention"]},
}


def ties():
    """By model_type, whether a configuration that does not state tie_word_embeddings has it. That of a multimodal model
    is its text model's, unless the whole model's own says no. A type of text models that transformers only knows inside
    others is tied where it is in all of them."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    tied = {}
    for name in sorted(causal | set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)):
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # it needs arguments
            continue
        inner = config.get_text_config(decoder=True)
        whole, text = (getattr(each, "tie_word_embeddings", None) for each in (config, inner))
        tied[name] = bool(text) and whole is not False
        if inner is not config and inner.model_type not in causal:
            tied[inner.model_type] = tied.get(inner.model_type, True) and tied[name]
    return tied


def shape_of(family):
    """What a later transformers must not change: names and shapes of tensors, and the settings that a head reads."""
    keys = re.compile("logit|softcap|soft_cap|multiplier|tie_word|vocab_size|model_type|dim_model_base|rms_norm_eps")

    def settings(config):
        return {k: settings(v) if isinstance(v, dict) else v for k, v in config.items() if k == "text_config" or keys.search(k)}

    return family["tensors"], settings(family["config"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("families", nargs="*")
    flags = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical")
    warnings.filterwarnings("ignore")
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    version = transformers.__version__
    path = HERE / f"families_{version.split('.')[0]}.json"
    stored = json.loads(path.read_text()) if path.exists() else {"transformers": "none", "families": {}}
    if flags.check and version != stored["transformers"]:
        print(f"skipped: transformers is {version}, and {path.name} is of {stored['transformers']}")
        sys.exit(77)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    left_out = NOT_IN_4 if version.startswith("4.") else ()
    names = flags.families or [name for name in (*WANTED, *NESTED) if name in known and name not in left_out]
    made = {name: family(name) for name in names}
    if flags.check:
        wrong = [name for name in names if shape_of(made[name]) != shape_of(stored["families"][name])]
        wrong += ["the defaults of tie_word_embeddings"] if ties() != stored["ties"] else []
        print(f"{len(names)} families of transformers {version}; not as stored: {', '.join(wrong) or 'none'}")
        sys.exit(1 if wrong else 0)
    kept = stored["families"] if flags.families else {}
    families = dict(sorted({**kept, **made}.items()))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in families.items())
    path.write_text(f'{{"transformers": {json.dumps(version)},\n"ties": {json.dumps(ties())},\n"families": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
