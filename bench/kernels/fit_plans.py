#!/usr/bin/env python3
"""Fits the numbers of the planner of ops on rows (kernels/cuda/rows/plan.h) to what kernel_bench --forms measured.

    kernel_bench --forms forms.txt && bench/kernels/fit_plans.py forms.txt [--launch 2] [--meeting 0.3] [--l2 128e3]

Prints the RowCost of every form, with the error of its times, and how much longer planned calls take than the best form.
A line of forms.txt: "op type k rows cells row_bytes form blocks teams places turns us", after "multiprocessors N
bytes_per_us R". k: of softmax_topk, else 0.
"""

import argparse
import collections
import math
import sys

Call = collections.namedtuple("Call", "op type k rows cells row_bytes")
Time = collections.namedtuple("Time", "call form blocks teams places turns us")


def read(path):
    device, times = {}, []
    for line in open(path):
        words = line.split()
        if words and words[0] == "multiprocessors":
            device = {"multiprocessors": int(words[1]), "bytes_per_us": float(words[3])}
        elif len(words) == 12:
            numbers = [float(word) for word in words[2:]]
            times.append(Time(Call(words[0], words[1], *numbers[:4]), *numbers[4:]))
    if not device or not times:
        sys.exit(f"{path}: no times; want the output of kernel_bench --forms")
    return device, times


def model(cost, device, at):
    """TimeOf of plan.cu. cost: cell_us, end_us, cell_work, end_work, then end_us and end_work for every 64 of k."""
    cell_us, end_us, cell_work, end_work, end_us_of_64, end_work_of_64 = cost
    call, multiprocessors = at.call, device["multiprocessors"]
    end_us += call.k / 64 * end_us_of_64 + (device["meeting"] if at.blocks > 1 else 0)
    end_work += call.k / 64 * end_work_of_64
    turns_us = at.turns * cell_us
    cells_work = call.cells / at.blocks * cell_work
    again = .5 if call.op == "cross_entropy_training" else 0
    held = device["l2"] * multiprocessors / (min(call.rows, at.places) * call.row_bytes)
    bytes_us = call.row_bytes * (1 + max(0, again - held)) / device["bytes_per_us"]
    waves = call.rows / at.places
    if waves > 3:
        return device["launch"] + end_us + max(call.rows * bytes_us + waves * end_us / at.teams,
                                               call.rows * at.blocks / multiprocessors * (cells_work + end_work),
                                               waves * (turns_us + end_us))

    def read_us(rows):
        return max(rows * bytes_us, math.ceil(rows * at.blocks / multiprocessors) * cells_work, turns_us)

    def ends_us(rows):
        return max(end_us, math.ceil(rows * at.blocks / multiprocessors) * end_work)

    whole = math.ceil(waves) - 1
    left = call.rows - whole * at.places
    wave = max(read_us(at.places) + ends_us(at.places) / at.teams, turns_us + end_us,
               at.places * at.blocks / multiprocessors * (cells_work + end_work))
    return device["launch"] + whole * wave + read_us(left) + ends_us(left)


def fit(device, times):
    """The cost of least squared error of the logarithms, by turns of one number at a time."""
    def error(cost):
        return sum(math.log(model(cost, device, at) / at.us) ** 2 for at in times)

    best, least = None, math.inf
    for start in ([.5, 3, .05, .3, .5, .1], [.5, 2, .1, .03, 2, .1], [.8, 6, .08, .02, .7, .4], [.1, 5, .06, 1, 1, .02]):
        cost, steps = list(start), [.4] * 6
        reached = error(cost)
        for turn in range(180):
            i = turn % 6
            for factor in (1 + steps[i], 1 / (1 + steps[i])):
                other = [max(1e-4, c * factor) if j == i else c for j, c in enumerate(cost)]
                if (now := error(other)) < reached:
                    cost, reached = other, now
                    break
            else:
                steps[i] *= .6
        if reached < least:
            best, least = cost, reached
    return best, math.sqrt(least / len(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times")
    parser.add_argument("--launch", type=float, default=2, help="us, as in devices.h")
    parser.add_argument("--meeting", type=float, default=.3, help="us, as in devices.h")
    parser.add_argument("--l2", type=float, default=128e3, help="l2_bytes, as in devices.h")
    args = parser.parse_args()
    device, times = read(args.times)
    device.update(launch=args.launch, meeting=args.meeting, l2=args.l2)

    of_form = collections.defaultdict(list)
    for at in times:
        of_form[at.call.op, at.call.type, int(at.form)].append(at)
    costs = {}
    for form, measured in sorted(of_form.items()):
        costs[form], error = fit(device, measured)
        print(*form, *(f"{number:.3f}" for number in costs[form]), f"error {error:.3f} of {len(measured)}", flush=True)

    of_call = collections.defaultdict(list)
    for at in times:
        of_call[at.call].append(at)
    longer = collections.defaultdict(list)
    for call, ways in of_call.items():
        planned = min(ways, key=lambda at: model(costs[call.op, call.type, int(at.form)], device, at))
        longer[call.op, call.type].append((planned.us / min(at.us for at in ways), call, int(planned.form)))
    for op, calls in sorted(longer.items()):
        worst = max(calls)
        print(*op, f"planned / best: {sum(c[0] for c in calls) / len(calls):.3f}, at most {worst[0]:.2f}:", *worst[1], worst[2])


if __name__ == "__main__":
    main()
