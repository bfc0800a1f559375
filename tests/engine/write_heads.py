#!/usr/bin/env python3
"""Writes the files of heads_test.cc: good and bad heads, written without our reader's code.

    write_heads.py DIRECTORY

Element (row, column) of every weight is pattern(row, column), exact in every dtype; vectors are pattern(i, 0).
"""

import base64
import json
import math
import os
import struct
import sys

FORMAT = {"F32": "f", "F16": "e", "I32": "i"}
SIZE = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}


def pattern(row, column):
    return ((row * 31 + column * 7) % 64 - 32) / 8


def encode(dtype, values):
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{FORMAT[dtype]}", *(int(v) if dtype == "I32" else v for v in values))


def tensor(dtype, *shape):
    """(dtype, shape, bytes) of a tensor with the pattern in it."""
    if len(shape) == 1:
        return dtype, list(shape), encode(dtype, [pattern(i, 0) for i in range(shape[0])])
    rows = [encode(dtype, [pattern(r, c) for c in range(shape[-1])]) for r in range(min(64, shape[0]))]
    return dtype, list(shape), b"".join(rows[r % 64] for r in range(shape[0]))


def write(path, tensors, metadata=None, change=lambda header: None):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        json.dump(value, file)


def folder(path, config, tensors):
    write_json(f"{path}/config.json", config)
    write(f"{path}/model.safetensors", tensors)


def sharded(path, config, shards, weight_map=None):
    write_json(f"{path}/config.json", config)
    stated = {name: file for file, tensors in shards.items() for name in tensors}
    write_json(f"{path}/model.safetensors.index.json", {
        "metadata": {"total_size": 7, "more": [[[{}]]]}, "weight_map": {**stated, **(weight_map or {})}})
    for file, tensors in shards.items():
        write(f"{path}/{file}", tensors)


def good(out):
    write(f"{out}/named.safetensors", {"other": tensor("F32", 9, 9), "lm_head.weight": tensor("F32", 5, 3),
                                       "lm_head.bias": tensor("F16", 5)})
    write(f"{out}/only.safetensors", {"a": tensor("I32", 6), "w": tensor("BF16", 4, 8)},
          {"format": "pt", "logit_scale": "0.5", "final_logit_softcapping": "30", "vocab_size": "3"})
    write(f"{out}/half.safetensors", {"head.weight": tensor("F16", 4, 8), "head.bias": tensor("BF16", 4)})
    write(f"{out}/nameless.safetensors", {"w": tensor("F16", 4, 8), "": tensor("F16", 4)})
    write(f"{out}/scales.safetensors", {"w": tensor("F16", 4, 8)}, {
        "logit_scale": "3", "lm_head_multiplier": "0.5", "logits_scaling": "4", "dim_model_base": "2"})
    for model in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gemma", "gemma2",
                  "qwen3", "qwen3_moe", "gemma3n"):
        folder(f"{out}/norm_of_{model}", {"model_type": model, "rms_norm_eps": 1e-6, "final_logit_softcapping": None},
               {"lm_head.weight": tensor("F16", 4, 8), "model.norm.weight": tensor("F16", 8)})
    write(f"{out}/big.safetensors", {"lm_head.weight": tensor("BF16", 13000, 1001)})
    folder(f"{out}/wide", {"model_type": "llama", "vocab_size": 2500, "rms_norm_eps": 1e-5},
           {"lm_head.weight": tensor("BF16", 2600, 3), "lm_head.bias": tensor("F16", 2600),
            "model.norm.weight": tensor("F16", 3)})
    folder(f"{out}/padded", {"model_type": "llama", "vocab_size": 6, "hidden_size": 16, "rms_norm_eps": 1e-5,
                             "final_logit_softcapping": None, "tie_word_embeddings": False},
           {"model.embed_tokens.weight": tensor("F32", 2, 2), "lm_head.weight": tensor("BF16", 8, 16),
            "model.norm.weight": tensor("F16", 16)})
    folder(f"{out}/tied", {"model_type": "gemma3", "tie_word_embeddings": True, "vocab_size": 99, "text_config": {
        "model_type": "gemma3_text", "vocab_size": 7, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0}},
           {"language_model.model.embed_tokens.weight": tensor("BF16", 7, 4),
            "language_model.model.norm.weight": tensor("BF16", 4)})
    sharded(f"{out}/sharded", {"model_type": "granite", "logits_scaling": 4, "vocab_size": 5}, {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": tensor("F32", 5, 4)},
        "model-00002-of-00002.safetensors": {"lm_head.weight": tensor("F32", 5, 4), "lm_head.bias": tensor("F32", 5)}})


def families(out):
    """What transformers 4 and 5 saved of their models (see write_families.py), each with expected.txt: the sizes rows,
    hidden and vocab, the last hidden states, and the logits that transformers computed from them. ties.txt: a line with
    the version, a model_type, and 1 if it ties its embeddings where that is not stated."""
    here = os.path.dirname(os.path.abspath(__file__))
    for version in ("4", "5"):
        with open(os.path.join(here, f"families_{version}.json"), encoding="utf-8") as file:
            saved = json.load(file)
        with open(f"{out}/ties.txt", "a") as file:
            file.writelines(f"{version} {name} {int(tied)}\n" for name, tied in saved["ties"].items())
        for name, family in saved["families"].items():
            write_family(f"{out}/families/{version}/{name}", family)


def write_family(path, family):
    def stored(key, shape):
        size = 4 * math.prod(shape)
        content = base64.b64decode(family["values"][key]) if key in family["values"] else b"\x01" * size
        return "F32", shape, content

    folder(path, family["config"], {key: stored(key, shape) for key, shape in family["tensors"].items()})
    hidden, logits = (struct.unpack(f"<{len(data) // 4}f", data)
                      for data in map(base64.b64decode, (family["hidden"], family["logits"])))
    with open(f"{path}/expected.txt", "w") as file:
        rows = family["rows"]
        print(rows, len(hidden) // rows, len(logits) // rows, *hidden, *logits, file=file)


def bad(out):
    head = {"lm_head.weight": tensor("F16", 4, 8)}
    with_bias = {**head, "lm_head.bias": tensor("F16", 4)}

    def offsets(begin, end):
        return lambda header: header["lm_head.weight"].update(data_offsets=[begin, end])

    def field(**fields):
        return lambda header: header["lm_head.weight"].update(fields)

    write(f"{out}/overlapping.safetensors", with_bias, change=lambda h: h["lm_head.bias"].update(data_offsets=[60, 68]))
    write(f"{out}/negative.safetensors", head, change=offsets(-64, 64))
    write(f"{out}/beyond.safetensors", head, change=offsets(0, 2**63))
    write(f"{out}/overflowing.safetensors", head, change=field(shape=[2**61, 2**5]))
    write(f"{out}/integers.safetensors", {"lm_head.weight": tensor("I32", 4, 8)})
    write(f"{out}/unknown_dtype.safetensors", head, change=field(dtype="F7"))
    write(f"{out}/cube.safetensors", {"lm_head.weight": tensor("F16", 4, 2, 8)[:1] + ([4, 2, 4], tensor("F16", 4, 8)[2])})
    write(f"{out}/no_rows.safetensors", {"lm_head.weight": ("F16", [0, 8], b""), "x": tensor("F16", 1)})
    write(f"{out}/two_matrices.safetensors", {"a": tensor("F16", 4, 8), "b": tensor("F16", 4, 8)})
    write(f"{out}/long_bias.safetensors", {**head, "lm_head.bias": tensor("F16", 5)})
    write(f"{out}/too_wide.safetensors", {"lm_head.weight": tensor("F16", 1, 65537)})
    write(f"{out}/scale_nan.safetensors", head, {"logit_scale": "nan"})
    write(f"{out}/scale_word.safetensors", head, {"logit_scale": "much"})
    write(f"{out}/scaling_0.safetensors", head, {"logits_scaling": "0"})
    write(f"{out}/scale_tiny.safetensors", head, {"logit_scale": "1e-60"})
    write(f"{out}/scale_huge.safetensors", head, {"logits_scaling": "1e-60"})
    write(f"{out}/cap_tiny.safetensors", head, {"final_logit_softcapping": "1e-60"})
    write(f"{out}/base_0.safetensors", head, {"dim_model_base": "0"})
    write(f"{out}/base_and_bias.safetensors", with_bias, {"dim_model_base": "4"})
    write(f"{out}/other_scale.safetensors", head, {"mup_width_multiplier": "8"})
    write(f"{out}/other_width.safetensors", head, {"mup_width_scale": "0.1"})
    folder(f"{out}/baichuan2", {"model_type": "baichuan", "vocab_size": 125696}, head)
    folder(f"{out}/baichuan_of_unknown_size", {"model_type": "baichuan"}, head)
    folder(f"{out}/baichuan_m1", {"model_type": "baichuan_m1", "vocab_size": 64000}, head)
    folder(f"{out}/norm_head", {"model_type": "bailing_moe", "norm_head": True}, head)
    folder(f"{out}/other_multiplier", {"output_multiplier_scale": 30}, head)
    for name, tensor_name in {"long_name": "a" * 129, "name_of_two_lines": "a\nb", "name_of_nothing": ""}.items():
        write(f"{out}/{name}.safetensors", {tensor_name: tensor("F16", 4, 8)})
    with open(f"{out}/named.safetensors", "rb") as file:
        whole = file.read()
    for name, content in {"cut": whole[:-1], "longer": whole + b"x", "empty": b"", "huge_header":
                          struct.pack("<Q", 2**40) + whole[8:], "no_json": struct.pack("<Q", 4) + b"{{{{"}.items():
        with open(f"{out}/{name}.safetensors", "wb") as file:
            file.write(content)

    norm = {"model.norm.weight": tensor("F16", 8)}
    llama = {"model_type": "llama", "rms_norm_eps": 1e-5}
    folder(f"{out}/mup_and_bias", {"logits_mup_width_multiplier": 4}, with_bias)
    folder(f"{out}/no_softcap", {"model_type": "paligemma", "text_config": {"model_type": "gemma2"}}, head)
    folder(f"{out}/no_scale", {"model_type": "aya_vision", "text_config": {"model_type": "cohere2"}}, head)
    folder(f"{out}/tied_encoder_decoder", {"is_encoder_decoder": True}, head)
    folder(f"{out}/final_logits_bias", {}, {**head, "final_logits_bias": tensor("F16", 1, 4)})
    folder(f"{out}/vocab_beyond", {"vocab_size": 5}, head)
    folder(f"{out}/vocab_negative", {"vocab_size": -5}, head)
    folder(f"{out}/not_tied", {"tie_word_embeddings": False}, {"model.embed_tokens.weight": tensor("F16", 4, 8)})
    folder(f"{out}/no_head", {}, {"a": tensor("F16", 4, 8)})
    folder(f"{out}/no_norm", llama, head)
    folder(f"{out}/layer_norm", llama, {**head, **norm, "model.norm.bias": tensor("F16", 8)})
    folder(f"{out}/norm_unknown", {"layer_norm_eps": 1e-5}, {**head, **norm})
    folder(f"{out}/gemma_unknown", {"model_type": "gemma9", "rms_norm_eps": 1e-5}, {**head, **norm})
    folder(f"{out}/qwen_unknown", {"model_type": "qwen3_5_other", "rms_norm_eps": 1e-5}, {**head, **norm})
    folder(f"{out}/long_norm", llama, {**head, "model.norm.weight": tensor("F16", 9)})
    write(f"{out}/no_config/model.safetensors", head)
    write_json(f"{out}/config_list/config.json", [])
    write(f"{out}/config_list/model.safetensors", head)
    write(f"{out}/deep/model.safetensors", head)
    with open(f"{out}/deep/config.json", "w") as file:
        file.write('{"logit_scale":' + "[" * 300000 + "]" * 300000 + "}")
    write_json(f"{out}/no_files/config.json", {})
    sharded(f"{out}/missing_shard", {}, {"a.safetensors": {"x": tensor("F16", 1)}}, {"lm_head.weight": "b.safetensors"})
    sharded(f"{out}/shard_without", {}, {"a.safetensors": {"x": tensor("F16", 1)}}, {"lm_head.weight": "a.safetensors"})
    # Many values after the entry that matters: the whole file is read, and quickly.
    for name, objects in {"index_of_objects": ",".join(f'"{i}":{{}}' for i in range(200000)),
                          "index_of_names": ",".join(f'"{i}":"x"' for i in range(200000))}.items():
        sharded(f"{out}/{name}", {}, {})
        with open(f"{out}/{name}/model.safetensors.index.json", "w") as file:
            file.write('{"weight_map":{"lm_head.weight":"none.safetensors",' + objects + "}}")
    for name, path, size in (("index", "large_index/model.safetensors.index.json", 16 << 20),
                             ("config", "large_config/config.json", 1 << 20)):
        write_json(f"{out}/large_{name}/config.json", {})
        if name == "config":
            write(f"{out}/large_config/model.safetensors", head)
        with open(f"{out}/{path}", "w") as file:
            file.write("{}" + " " * (size - 1))
    with open(f"{out}/long_header.safetensors", "wb") as file:
        file.write(struct.pack("<Q", (16 << 20) + 1))
        file.truncate((16 << 20) + 9)
    for name, target in {"leaving": "../named.safetensors", "absolute": "/etc/passwd", "parent": "..", "long_shard": "a" * 256,
                         "two_lines": "a\nb"}.items():
        sharded(f"{out}/{name}", {}, {"a.safetensors": {"x": tensor("F16", 1)}}, {"lm_head.weight": target})
    write_json(f"{out}/no_map/config.json", {})
    write_json(f"{out}/no_map/model.safetensors.index.json", {"weight_map": [1]})


if __name__ == "__main__":
    good(sys.argv[1])
    bad(sys.argv[1])
    families(sys.argv[1])
