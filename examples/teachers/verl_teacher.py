"""The teacher of verl's on-policy distillation, with logitd as its output head.

`AsyncTeacherLLMServerManager` of verl/experimental/teacher_loop (verl 0.10.0.dev) asks `generate` of a client for the
log-probabilities of a finished sequence. The client only needs that method:

    teacher = Teacher(model, logitd.Client("gpu-1:7450"), head="teacher")
    manager = AsyncTeacherLLMServerManager(config, {key: SimpleNamespace(generate=partial(generate, teacher))})
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from logitd import InvalidArgument
from logitd.trl import Teacher


async def generate(
    teacher: Teacher, request_id: str, *, prompt_ids: Sequence[int], sampling_params: dict[str, Any], **media: Any
) -> SimpleNamespace:
    """The answer of verl's LLMServerClient.generate to a request for the log-probabilities of a prompt.

    request_id: not used. prompt_ids: S token ids, 1 or more, prompt and response.
    sampling_params: `prompt_logprobs` is K, 0 to 128; `temperature` is 1. verl also sends `max_tokens` of 1 because its
        engines must draw a token; it does not read that token, and none is drawn here.
    media: `image_data` and the like, each None.

    `extra_fields` of the answer has two lists of S rows with max(K, 1) numbers: `prompt_ids` and `prompt_logprobs`,
    natural log. Row i is of the token after place i: the K most probable tokens, the most probable first; with a K of 0
    the sequence's own token. The last row is zeros: verl does not read it.

    InvalidArgument: any other request; otherwise as Teacher.get_sequence_logprobs.
    """
    for name, value in media.items():
        if value:
            raise InvalidArgument(f"{name}: got {type(value).__name__}, allowed None")
    k, temperature = sampling_params.get("prompt_logprobs"), sampling_params.get("temperature", 1.0)
    if not isinstance(k, int) or not 0 <= k <= 128:
        raise InvalidArgument(f"prompt_logprobs: got {k!r}, allowed 0..128")
    if temperature != 1:
        raise InvalidArgument(f"temperature: got {temperature!r}, allowed 1")
    width = max(k, 1)
    scored = await asyncio.to_thread(
        teacher.get_sequence_logprobs, [list(prompt_ids)], prompt_lengths=[1], top_logprobs=width
    )
    ids, logprobs = ("logprob_token_ids", "logprobs") if k else ("actual_token_ids", "actual_logprobs")
    return SimpleNamespace(
        token_ids=[],
        extra_fields={
            "prompt_ids": [*scored[ids][0], [0] * width],
            "prompt_logprobs": [*scored[logprobs][0], [0.0] * width],
        },
    )
