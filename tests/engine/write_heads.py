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


def refused(out):
    """Bad heads, and refused.json with what is said of each: texts of the error, which is INVALID_ARGUMENT or NOT_FOUND."""
    said = []
    head = {"lm_head.weight": tensor("F16", 4, 8)}
    bias = {"lm_head.bias": tensor("F16", 4)}
    norm = {"model.norm.weight": tensor("F16", 8)}

    def bad(name, *texts, missing=False, final_norm=False):
        said.append({"path": name, "texts": texts, "missing": missing, "norm": final_norm})
        return f"{out}/{name}"

    def bad_file(name, texts, tensors, metadata=None, **change):
        def update(header):
            header["lm_head.weight"].update(change)

        write(bad(f"{name}.safetensors", *texts), tensors, metadata, update if change else lambda header: None)

    bad("none.safetensors", "none.safetensors: No such file", missing=True)
    bad_file("negative", ("'lm_head.weight'", "got [-64,64], allowed inside"), head, data_offsets=[-64, 64])
    bad_file("beyond", ("'lm_head.weight'", "allowed inside the file's 64"), head, data_offsets=[0, 2**63])
    bad_file("overlapping", ("overlapping.safetensors: tensor 'lm_head.weight'", "got begin 4", "allowed 8"),
             {**bias, **head}, data_offsets=[4, 68])
    bad_file("overflowing", ("allowed one with its 64 data bytes",), head, shape=[2**61, 2**5])
    bad_file("unknown_dtype", ("got 'F7', allowed F32",), head, dtype="F7")
    bad_file("integers", ("dtype of tensor 'lm_head.weight': got 'I32', allowed F32, F16, BF16",),
             {"lm_head.weight": tensor("I32", 4, 8)})
    bad_file("cube", ("got [4,2,4], allowed [-1,-1]; -1: any size above 0",), head, shape=[4, 2, 4])
    bad_file("no_rows", ("got [0,8], allowed [-1,-1]",), {"lm_head.weight": ("F16", [0, 8], b""), "x": tensor("F16", 1)})
    bad_file("two_matrices", ("tensors of 2 dimensions: got 2, allowed 1",), {"a": tensor("F16", 4, 8), "b": tensor("F16", 4, 8)})
    bad_file("long_bias", ("shape of tensor 'lm_head.bias': got [5], allowed [4]",), {**head, "lm_head.bias": tensor("F16", 5)})
    bad_file("too_wide", ("too_wide.safetensors: hidden", "65537"), {"lm_head.weight": tensor("F16", 1, 65537)})
    for name, weight, text in (("long_name", "a" * 129, "of 129 bytes, allowed 1 to 128"),
                               ("name_of_two_lines", "a\nb", "name of the weight: got 'a\\nb'"),
                               ("unprintable_name", "\x7f", "printable"), ("name_of_nothing", "", "name of the weight: got ''")):
        bad_file(name, (text,), {weight: tensor("F16", 4, 8)})
    for name, key, value, text in (
            ("scale_nan", "logit_scale", "nan", "scale: got nan"),
            ("scale_word", "logit_scale", "much", "logit_scale: got 'much', allowed a number"),
            ("scaling_0", "logits_scaling", "0", "logits_scaling: got 0"),
            ("scale_tiny", "logit_scale", "1e-60", "scale of the logits: got 1e-60, allowed 0, or"),
            ("scale_huge", "logits_scaling", "1e-60", "scale of the logits: got 1e+60, allowed 0, or"),
            ("cap_tiny", "final_logit_softcapping", "1e-60", "final_logit_softcapping: got 1e-60, allowed 0, or"),
            ("base_0", "dim_model_base", "0", "dim_model_base: got 0, allowed"),
            ("other_scale", "mup_width_multiplier", "8", "mup_width_multiplier: got 8, allowed none"),
            ("other_width", "mup_width_scale", "0.1", "mup_width_scale: got 0.1, allowed none")):
        bad_file(name, (text,), head, {key: value})
    bad_file("base_and_bias", ("dim_model_base: got one and a bias",), {**head, **bias}, {"dim_model_base": "4"})
    with open(f"{out}/named.safetensors", "rb") as file:
        whole = file.read()
    for name, content, text in (
            ("cut", whole[:-1], "allowed inside the file's"), ("longer", whole + b"x", "end of the tensors: got"),
            ("empty", b"", "shorter than the 8 bytes"), ("no_json", struct.pack("<Q", 4) + b"{{{{", "header is not a JSON object"),
            ("huge_header", struct.pack("<Q", 2**40) + whole[8:], "header length: got 1099511627776"),
            ("long_header", struct.pack("<Q", (16 << 20) + 1), "header length: got 16777217, allowed 0..16777216")):
        with open(bad(f"{name}.safetensors", text), "wb") as file:
            file.write(content)
            file.truncate(max(len(content), (16 << 20) + 9 if name == "long_header" else 0))

    for name, config, tensors, *texts in (
            ("baichuan2", {"model_type": "baichuan", "vocab_size": 125696}, head,
             "model_type: got 'baichuan', which normalises the weight of its head", "64000"),
            ("baichuan_of_unknown_size", {"model_type": "baichuan"}, head, "model_type: got 'baichuan', which normalises"),
            ("baichuan_m1", {"model_type": "baichuan_m1", "vocab_size": 64000}, head, "got 'baichuan_m1', which normalises"),
            ("norm_head", {"model_type": "bailing_moe", "norm_head": True}, head, "norm_head: got true, allowed false"),
            ("other_multiplier", {"output_multiplier_scale": 30}, head, "config.json: output_multiplier_scale: got 30, allowed none"),
            ("mup_and_bias", {"logits_mup_width_multiplier": 4}, {**head, **bias}, "logits_mup_width_multiplier: got one and a bias"),
            ("no_softcap", {"model_type": "paligemma", "text_config": {"model_type": "gemma2"}}, head,
             "final_logit_softcapping: got none", "type gemma2"),
            ("no_scale", {"model_type": "aya_vision", "text_config": {"model_type": "cohere2"}}, head,
             "logit_scale: got none", "type cohere2"),
            ("tied_encoder_decoder", {"is_encoder_decoder": True}, head, "is_encoder_decoder: got true with tied"),
            ("final_logits_bias", {}, {**head, "final_logits_bias": tensor("F16", 1, 4)}, "tensor 'final_logits_bias': got one"),
            ("vocab_beyond", {"vocab_size": 5}, head, "config.json: vocab_size: got 5, allowed 1 to 4"),
            ("vocab_negative", {"vocab_size": -5}, head, "vocab_size: got -5, allowed an integer of 1 or more"),
            ("not_tied", {"tie_word_embeddings": False}, {"model.embed_tokens.weight": tensor("F16", 4, 8)},
             "tie_word_embeddings: got false, allowed true"),
            ("no_head", {}, {"a": tensor("F16", 4, 8)}, "no_head: no tensor 'lm_head.weight'"),
            ("config_list", [], head, "config.json: not a JSON object")):
        folder(bad(name, *texts), config, tensors)
    llama = {"model_type": "llama", "rms_norm_eps": 1e-5}
    for name, config, tensors, *texts in (
            ("no_norm", llama, {}, "final norm: got none, allowed one of the tensors model.norm.weight"),
            ("layer_norm", llama, {**norm, "model.norm.bias": tensor("F16", 8)}, "got a LayerNorm with the bias 'model.norm.bias'"),
            ("norm_unknown", {"layer_norm_eps": 1e-5}, norm, "rms_norm_eps: got none"),
            ("gemma_unknown", {**llama, "model_type": "gemma9"}, norm, "model_type: got 'gemma9'", "gemma2"),
            ("qwen_unknown", {**llama, "model_type": "qwen3_5_other"}, norm, "got 'qwen3_5_other'", "qwen3_5_moe"),
            ("long_norm", llama, {"model.norm.weight": tensor("F16", 9)}, "'model.norm.weight': got [9], allowed [8]")):
        folder(bad(name, *texts, final_norm=True), config, {**head, **tensors})

    def text_file(path, text):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)

    write(bad("no_config", "no_config/config.json: No such file", missing=True) + "/model.safetensors", head)
    for name, config, text in (
            ("deep", '{"logit_scale":' + "[" * 300000 + "]" * 300000 + "}", "logit_scale: got an array, allowed a number"),
            ("large_config", "{}" + " " * ((1 << 20) - 1), "config.json: got 1048577 bytes, allowed up to 1048576")):
        write(bad(name, text) + "/model.safetensors", head)
        text_file(f"{out}/{name}/config.json", config)
    text_file(bad("no_files", "no_files: the folder has neither model.safetensors nor", missing=True) + "/config.json", "{}")
    # Many values after the entry that matters: the whole file is read, and quickly.
    for name, index, text in (
            ("no_map", '{"weight_map": [1]}', "weight_map: got none"),
            ("large_index", "{}" + " " * ((16 << 20) - 1), "index.json: got 16777217 bytes, allowed up to 16777216"),
            *((f"index_of_{name}", '{"weight_map":{"lm_head.weight":"none.safetensors",' +
               ",".join(f'"{i}":{value}' for i in range(200000)) + "}}", "none.safetensors: No such file")
              for name, value in (("objects", "{}"), ("names", '"x"')))):
        path = bad(name, text, missing=name.startswith("index_of"))
        text_file(f"{path}/config.json", "{}")
        text_file(f"{path}/model.safetensors.index.json", index)
    for name, target, *texts in (
            ("missing_shard", "b.safetensors", "b.safetensors: No such file", "the file of tensor"),
            ("shard_without", "a.safetensors", "a.safetensors: no tensor 'lm_head.weight'"),
            ("leaving", "../named.safetensors", "tensor 'lm_head.weight': got '../named.safetensors', allowed"),
            ("absolute", "/etc/passwd", "got '/etc/passwd', allowed a file in the folder"),
            ("parent", "..", "got '..', allowed a file in the folder"),
            ("long_shard", "a" * 256, "got 'aaaaaaa", "allowed a file in the folder"),
            ("two_lines", "a\nb", "got 'a\\nb', allowed a file in the folder")):
        sharded(bad(name, *texts, missing=name == "missing_shard"), {}, {"a.safetensors": {"x": tensor("F16", 1)}},
                {"lm_head.weight": target})
    write_json(f"{out}/refused.json", said)


if __name__ == "__main__":
    good(sys.argv[1])
    refused(sys.argv[1])
    families(sys.argv[1])
