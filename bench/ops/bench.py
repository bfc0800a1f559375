"""logitd.ops on a CUDA device: what a call costs the host, losses beside other libraries, and memory. Writes JSON.

    bench.py OUT.json

Every part that fails leaves its error in the file, and the others go on. Peers that are not installed are named so.
"""

import json
import statistics
import sys
import time
import traceback

import torch
import torch.nn.functional as F

from logitd import ops
from logitd.ops import _library, _losses, _structs

SHAPES = ((4096, 4096, 128256), (8192, 2048, 128256), (4096, 4096, 32000))  # rows, hidden, vocabulary
ROUNDS = 5
MIB = 2**20


def device_ms(run, rounds=ROUNDS):
    """The median time of a call on the device, in ms, after two calls that are not counted."""
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_us(run, calls=300):
    """The time of a call until it returns, in us: the median of ten rounds."""
    rounds = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls // 10):
            run()
        rounds.append((time.perf_counter() - begin) / (calls // 10) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(rounds)


def inputs(rows, hidden, vocab, dtype=torch.bfloat16):
    torch.manual_seed(1)
    states = torch.randn(rows, hidden, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") * hidden**-0.5).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device="cuda")
    target[::9] = -100
    return states, weight, target


def peers():
    """Losses of other libraries by name, or why they are not there."""
    found = {"torch: linear, cross_entropy": lambda h, w, t: F.cross_entropy((h @ w.T).float(), t)}
    found["torch: linear, cross_entropy in bf16"] = lambda h, w, t: F.cross_entropy(h @ w.T, t)
    compiled = torch.compile(lambda h, w, t: F.cross_entropy((h @ w.T).float(), t))
    found["torch.compile of linear, cross_entropy"] = compiled
    if hasattr(F, "linear_cross_entropy"):
        found["torch.nn.functional.linear_cross_entropy"] = F.linear_cross_entropy
    missing = (
        {} if hasattr(F, "linear_cross_entropy") else {"torch.nn.functional.linear_cross_entropy": torch.__version__}
    )
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["Liger fused_linear_cross_entropy"] = lambda h, w, t: liger_fused_linear_cross_entropy(h, w, t)
    except Exception as error:
        missing["Liger"] = repr(error)
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        found["QuACK chunked_linear_cross_entropy"] = chunked_linear_cross_entropy
    except Exception as error:
        missing["QuACK"] = repr(error)
    return found, missing


def training():
    """Forward and backward of a mean loss: time, and the memory beside inputs and gradients."""
    found, missing = peers()
    found = {"logitd.ops.linear_cross_entropy": ops.linear_cross_entropy, **found}
    results = []
    for shape in SHAPES:
        for name, loss_of in found.items():
            states, weight, target = inputs(*shape)
            row = {"rows_hidden_vocab": shape, "dtype": "bf16", "what": name}

            def step():
                states.grad = weight.grad = None
                loss = loss_of(states, weight, target)
                loss.backward()
                return loss

            try:
                row["loss"] = step().item()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                states.grad = weight.grad = None
                before = torch.cuda.memory_allocated()
                step()
                torch.cuda.synchronize()
                gradients = (states.numel() + weight.numel()) * 2
                row["peak_mib_beside_inputs_and_gradients"] = (
                    torch.cuda.max_memory_allocated() - before - gradients
                ) / MIB
                row["ms"] = device_ms(step)
                row["tflops"] = 6 * shape[0] * shape[1] * shape[2] * 1e-9 / row["ms"]
            except Exception as error:
                row["error"] = repr(error)[:300]
            results.append(row)
            del states, weight, target
            torch.cuda.empty_cache()
    workspace = sum(call.workspace_bytes for place in _library._CUDA.values() for _, call in place.calls.values())
    return {"rows": results, "not_there": missing, "workspace_mib_of_logitd": workspace / MIB}


def overhead():
    """Host time of a call beside that of the library's function alone, on inputs so small that the device waits."""
    rows, hidden, vocab = 64, 256, 1024
    states, weight, target = inputs(rows, hidden, vocab)
    logits = torch.randn(rows, vocab, device="cuda", requires_grad=True)
    ones = torch.ones(rows, device="cuda")
    options = _losses.Options(-100, 1.0, 0.0, 0.0, 0.0, 1.0, 0)
    answers = torch.empty((3, rows), device="cuda")
    d_states, d_weight = torch.empty_like(states), torch.empty_like(weight)
    op = _structs.CrossEntropyTraining()
    kept = _losses._input(op, states, weight, None, target, options)
    at = answers.data_ptr()
    op.loss, op.logsumexp, op.target_logprob, op.upstream = at, at + 4 * rows, at + 8 * rows, ones.data_ptr()
    op.d_input, op.d_weight = _losses.view(d_states), _losses.view(d_weight)
    place, stream = _library._CUDA[0], torch.cuda.current_stream().cuda_stream
    op.struct_size = _structs.ctypes.sizeof(op)
    call = place.call(stream, rows)
    byref, run = _library._byref, _library._RUN["cross_entropy_training"]
    bare = host_us(lambda: run(place.context, byref(call), byref(op)))
    frozen, frozen_weight, plain = states.detach(), weight.detach(), logits.detach()

    def both(loss_of):
        states.grad = weight.grad = logits.grad = None
        loss_of().backward()

    scores = torch.randn(1, 4, 16, 128, device="cuda")
    results = {
        "library's function alone, linear_cross_entropy with gradients": bare,
        "linear_cross_entropy with gradients, sum, forward": host_us(
            lambda: ops.linear_cross_entropy(states, weight, target, reduction="sum")
        ),
        "linear_cross_entropy with gradients, mean, forward": host_us(
            lambda: ops.linear_cross_entropy(states, weight, target)
        ),
        "linear_cross_entropy, mean, forward and backward": host_us(
            lambda: both(lambda: ops.linear_cross_entropy(states, weight, target))
        ),
        "torch linear, cross_entropy, mean, forward and backward": host_us(
            lambda: both(lambda: F.cross_entropy(states @ weight.T, target))
        ),
        "linear_cross_entropy without gradients, none": host_us(
            lambda: ops.linear_cross_entropy(frozen, frozen_weight, target, reduction="none")
        ),
        "cross_entropy without gradients, none": host_us(lambda: ops.cross_entropy(plain, target, reduction="none")),
        "torch cross_entropy without gradients, none": host_us(
            lambda: F.cross_entropy(plain, target, reduction="none")
        ),
        "softmax_topk": host_us(lambda: ops.softmax_topk(plain, 8)),
        "sample": host_us(lambda: ops.sample(plain, seed=1, top_k=8)),
        "scaled_masked_softmax": host_us(lambda: ops.scaled_masked_softmax(scores, causal=True)),
    }
    del kept
    return {"us": results}


def queued():
    """Device time that a call adds where the host is ahead, in us: 50 calls in a row, beside the bare function."""
    rows, vocab = 4096, 128256
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, vocab, (rows,), device="cuda")
    op = _structs.CrossEntropy()
    kept = _losses._input(op, logits, None, None, target, _losses.Options(-100, 1.0, 0.0, 0.0, 0.0, 1.0, 0))
    answers = _losses._answers(op, logits, 0)
    op.struct_size = _structs.ctypes.sizeof(op)
    place = _library._CUDA[0]
    call = place.call(torch.cuda.current_stream().cuda_stream, rows)
    byref, run = _library._byref, _library._RUN["cross_entropy"]

    def fifty(one):
        return lambda: [one() for _ in range(50)]

    bare = device_ms(fifty(lambda: run(place.context, byref(call), byref(op)))) * 20
    none = device_ms(fifty(lambda: ops.cross_entropy(logits, target, reduction="none"))) * 20
    mean = device_ms(fifty(lambda: ops.cross_entropy(logits, target))) * 20
    del kept, answers
    return {
        "us": {"bare": bare, "none": none, "mean": mean, "none over bare": none - bare, "mean over bare": mean - bare}
    }


def kernels():
    """Device time of ops beside torch's, on sizes where the kernel is what counts."""
    logits = torch.randn(4096, 128256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 128256, (4096,), device="cuda")
    scores = torch.randn(4, 32, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    plain = logits.detach()

    def both(loss_of):
        logits.grad = None
        loss_of(logits, target).backward()

    return {
        "ms": {
            "cross_entropy 4096 x 128256 bf16, forward and backward": device_ms(lambda: both(ops.cross_entropy)),
            "torch cross_entropy, forward and backward": device_ms(lambda: both(F.cross_entropy)),
            "scaled_masked_softmax causal [4, 32, 2048, 2048] bf16": device_ms(
                lambda: ops.scaled_masked_softmax(scores, causal=True)
            ),
            "torch softmax [4, 32, 2048, 2048] bf16, no mask": device_ms(lambda: torch.softmax(scores, -1)),
            "softmax_topk 4096 x 128256, k 8": device_ms(lambda: ops.softmax_topk(plain, 8)),
            "torch softmax, topk": device_ms(lambda: torch.softmax(plain, -1).topk(8)),
        }
    }


def compiled():
    """torch.compile with inductor, and CUDA graphs, beside eager calls: the largest difference of each."""
    parts = (inductor, reduced_overhead, captured_losses, captured_step)
    return {part.__name__: attempt(part) for part in parts}


def steps_apart(step):
    """How far the loss and the weight's gradient of three calls of `step` are from eager ones."""
    states, weight, target = inputs(256, 512, 4000)
    eager = ops.linear_cross_entropy(states, weight, target)
    eager.backward()
    gradient, apart = weight.grad.clone(), []
    for _ in range(3):
        states.grad = weight.grad = None
        loss = step(states, weight, target)
        loss.backward()
        apart.append((loss.item() - eager.item(), (weight.grad - gradient).abs().max().item()))
    return apart


def inductor():
    return steps_apart(torch.compile(lambda h, w, t: ops.linear_cross_entropy(h * 1.0, w, t), fullgraph=True))


def reduced_overhead():
    """With the CUDA graphs of torch.compile."""
    of = torch.compile(lambda h, w, t: ops.linear_cross_entropy(h * 1.0, w, t), mode="reduce-overhead", fullgraph=True)
    return steps_apart(of)


def captured_losses():
    states, weight, target = (of.detach() for of in inputs(256, 512, 4000))
    before = ops.linear_cross_entropy(states, weight, target, reduction="none")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = ops.linear_cross_entropy(states, weight, target, reduction="none")
    apart = []
    for _ in range(2):
        captured.zero_()
        graph.replay()
        other = ops.linear_cross_entropy(states, weight, target, reduction="none")  # shares nothing with the graph
        torch.cuda.synchronize()
        apart.append(((captured - before).abs().max().item(), (other - before).abs().max().item()))
    return apart


def captured_step():
    """Forward and backward in one graph."""
    states, weight, target = inputs(256, 512, 4000)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            states.grad = weight.grad = None
            ops.linear_cross_entropy(states, weight, target).backward()
    torch.cuda.current_stream().wait_stream(stream)
    gradient = weight.grad.clone()
    states.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.linear_cross_entropy(states, weight, target).backward()
    apart = []
    for _ in range(2):
        weight.grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        apart.append((weight.grad - gradient).abs().max().item())
    return apart


def accuracy():
    """The largest error of losses and gradients beside torch in float64, each beside the largest of its tensor."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, hidden, vocab in ((512, 1024, 32000), (77, 136, 5003)):
            states, weight, target = inputs(rows, hidden, vocab, dtype)
            doubles = [of.detach().double().requires_grad_() for of in (states, weight)]
            loss = ops.linear_cross_entropy(states, weight, target, z_loss=1e-3)
            logits = doubles[0] @ doubles[1].T
            counted = target != -100
            own = F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1)[counted].square().mean()
            loss.backward()
            own.backward()
            pairs = ((loss, own), (states.grad, doubles[0].grad), (weight.grad, doubles[1].grad))
            found[f"{str(dtype)[6:]} {rows} x {hidden} x {vocab}: loss, d_hidden, d_weight"] = [
                ((mine.double() - other).abs().max() / other.abs().max()).item() for mine, other in pairs
            ]
    return found


def curves():
    """Losses of a small transformer, trained with torch's cross-entropy and with that of logitd.ops."""
    losses = {}
    for name in ("torch", "logitd"):
        torch.manual_seed(3)
        vocab, width = 512, 256
        embed, head = torch.nn.Embedding(vocab, width), torch.nn.Linear(width, vocab, bias=False)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 512, dropout=0.0, batch_first=True)
        model = torch.nn.ModuleList([embed, layer, head]).cuda()
        tokens = torch.randint(0, vocab, (16, 65), device="cuda")
        causal = torch.nn.Transformer.generate_square_subsequent_mask(64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for _ in range(50):
            hidden, target = layer(embed(tokens[:, :-1]), src_mask=causal, is_causal=True), tokens[:, 1:]
            if name == "torch":
                loss = F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
            else:
                loss = ops.linear_cross_entropy(hidden, head.weight, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        losses[name] = curve
    apart = max(abs(mine - own) for mine, own in zip(losses["logitd"], losses["torch"]))
    return {"largest difference": apart, **losses}


def attempt(part):
    """The result of a part, or its error."""
    try:
        return part()
    except Exception:
        return {"error": traceback.format_exc()[-1500:]}


def main():
    out = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    ops.linear_cross_entropy(*inputs(64, 64, 128)).backward()  # opens the device
    for part in (accuracy, overhead, queued, training, kernels, compiled, curves):
        out[part.__name__] = attempt(part)
        print(part.__name__, json.dumps(out[part.__name__], indent=1), flush=True)
    with open(sys.argv[1], "w") as file:
        json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
