"""The teacher of slime's on-policy distillation, with logitd as its output head.

slime's `reward_func` of slime/rollout/on_policy_distillation.py (slime 0.3.1) posts a sample's tokens to an SGLang
server and trains on `meta_info["input_token_logprobs"]` of the answer. generate() gives the same answer to the same
request. A function of your own, named by `--custom-rm-path`, stands in place of slime's:

    teacher = Teacher(model, logitd.Client("gpu-1:7450"), head="teacher")

    async def reward_func(args, sample, **kwargs):
        return await asyncio.to_thread(generate, teacher, {"input_ids": sample.tokens, "return_logprob": True})

`--custom-reward-post-process-path` keeps slime's own `post_process_rewards`.
"""

from __future__ import annotations

from typing import Any

from logitd import InvalidArgument
from logitd.trl import Teacher

# Fields of a request with the one value that slime sends.
_ALLOWED = {"return_logprob": True, "logprob_start_len": 0}


def generate(teacher: Teacher, request: dict[str, Any]) -> dict[str, Any]:
    """SGLang's answer of /generate to a request that only asks for the log-probabilities of its tokens.

    request: `input_ids`, S token ids, 1 or more; `return_logprob`, True; `logprob_start_len`, 0 or missing;
        `sampling_params`, with `max_new_tokens` of 0 where it is there. Its temperature changes nothing, as in SGLang,
        whose log-probabilities of input tokens are those at temperature 1.

    `meta_info["input_token_logprobs"]` of the answer has S entries [log-probability, token id, None], natural log. The
    first one's log-probability is None: nothing comes before that token.

    InvalidArgument: any other request, also one with pictures; otherwise as Teacher.get_sequence_logprobs.
    """
    for name, allowed in _ALLOWED.items():
        if request.get(name, 0) != allowed:
            raise InvalidArgument(f"{name}: got {request.get(name)!r}, allowed {allowed!r}")
    new_tokens = request.get("sampling_params", {}).get("max_new_tokens", 0)
    if new_tokens != 0:
        raise InvalidArgument(f"sampling_params.max_new_tokens: got {new_tokens!r}, allowed 0")
    if request.get("image_data"):
        raise InvalidArgument(f"image_data: got {len(request['image_data'])} pictures, allowed none")
    tokens = list(request["input_ids"])
    scored = teacher.get_sequence_logprobs([tokens], prompt_lengths=[0], top_logprobs=1)
    logprobs = [None, *(values[0] for values in scored["actual_logprobs"][0][1:])]
    return {
        "text": "",
        "meta_info": {
            "prompt_tokens": len(tokens),
            "completion_tokens": 0,
            "input_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, tokens)],
        },
    }
