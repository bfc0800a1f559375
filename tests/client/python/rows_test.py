"""TopK, Sample, Verify, Score and heads against a real server, by definition."""

import json
import math
import os
import pathlib
import struct
import tempfile

import logitd
import numpy as np
from harness import RunningServer, ServerTestCase
from logitd import _params
from reference import log_softmax, order

RANDOM = np.random.default_rng(20240613)


def bf16_bits(values):
    """float32 values whose lower half is zero, as the bits of bf16."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(shape):
    bits = RANDOM.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32)


class TopKTest(ServerTestCase):
    def test_is_the_definition(self):
        logits = RANDOM.standard_normal((3, 5000)).astype(np.float32) * 5
        ks, temperatures = [1, 10, 5000], [1.0, 0.5, 2.0]
        logprobs, logsumexp = log_softmax(logits, temperatures)
        for address in (self.server.tcp, self.server.unix):
            for client in self.both(address):
                result = client.top_k(logits, k=ks, temperature=temperatures)
                self.assertTrue(result.ok.all())
                np.testing.assert_allclose(result.logsumexp, logsumexp, rtol=2e-6)
                for row, k in enumerate(ks):
                    want = order(logits[row])[:k]
                    self.assertEqual(result.indices[row].tolist(), want.tolist())
                    np.testing.assert_allclose(result.probs[row], np.exp(logprobs[row, want]), rtol=4e-6, atol=1e-37)
                self.assertGreater(result.timings.kernel_ns, 0)
                self.assertEqual(result.attempts, 1)
                self.assertLess(result.timings.total_ns / 1e9, result.round_trip)

    def test_lists_of_one_length_are_a_matrix(self):
        logits = RANDOM.standard_normal((4, 100)).astype(np.float32)
        for client in self.both(self.server.unix):
            result = client.top_k(logits, k=3)
            self.assertEqual(result.indices.dense().tolist(), [order(row)[:3].tolist() for row in logits])
            self.assertTrue(np.shares_memory(result.indices.dense(), result.indices.values))
            with self.refused(ValueError, "from 1 to 4", "allowed one length"):
                client.top_k(logits, k=[1, 2, 3, 4]).indices.dense()

    def test_every_type_of_element_has_its_value(self):
        exact = bf16_values((2, 300))
        half = exact.astype(np.float16)
        for client in self.both(self.server.unix):
            for array, dtype, values in (
                (exact, None, exact),
                (half, None, half),
                (bf16_bits(exact), "bf16", exact),
                (exact.astype(">f4"), None, exact),
                (exact[:, ::3], None, exact[:, ::3]),
            ):
                result = client.top_k(array, k=5, dtype=dtype)
                self.assertEqual(result.indices[1].tolist(), order(values[1])[:5].tolist(), (array.dtype, dtype))

    def test_bfloat16_of_ml_dtypes_is_taken(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        exact = bf16_values((2, 300))
        for client in self.both(self.server.unix):
            result = client.top_k(exact.astype(ml_dtypes.bfloat16), k=5)
            self.assertEqual(result.indices[0].tolist(), order(exact[0])[:5].tolist())

    def test_one_row_needs_no_second_dimension(self):
        logits = RANDOM.standard_normal(50).astype(np.float32)
        for client in self.both(self.server.unix):
            self.assertEqual(client.top_k(logits, k=1).indices[0].tolist(), [int(logits.argmax())])

    def test_a_row_with_nan_says_so_and_other_rows_are_right(self):
        logits = RANDOM.standard_normal((3, 40)).astype(np.float32)
        logits[1, 7] = np.nan
        logits[2, :] = -np.inf
        for client in self.both(self.server.unix):
            result = client.top_k(logits, k=1)
            self.assertEqual(result.status.tolist(), [0, logitd.RowStatus.NAN_LOGIT, logitd.RowStatus.EMPTY_SUPPORT])
            self.assertEqual(result.status_position.tolist(), [-1, 7, -1])
            self.assertEqual(result.ok.tolist(), [True, False, False])
            self.assertEqual(result.indices[0].tolist(), [int(logits[0].argmax())])


class SampleTest(ServerTestCase):
    # Seed 0: 0.8805 at position 0, 0.3621 at position 1, 0.6937 at position 4, as fractions of the total weight.
    LOGITS = np.log(np.array([[0.5, 0.25, 0.25]] * 3, np.float32))

    def test_draws_what_the_definition_draws(self):
        for client in self.both(self.server.tcp):
            result = client.sample(
                self.LOGITS, seed=0, position=[0, 1, 4], top_p=[1, 1, 0.6], top_logprobs=3, want_rank=True
            )
            self.assertEqual(result.tokens.tolist(), [2, 0, 1])
            self.assertEqual(result.ranks.tolist(), [3, 1, 2])
            self.assertEqual(result.top_ids.dense().tolist(), [[0, 1, 2]] * 3)
            np.testing.assert_allclose(result.logprobs, np.log([0.25, 0.5, 0.25]), rtol=1e-5)

    def test_every_parameter_does_its_part(self):
        logits = np.zeros((4, 70), np.float32)
        logits[:, 69] = 9
        logits[:, 33] = 5
        logits[:, 2] = 3
        allowed = np.ones((2, 70), bool)
        allowed[0, 69] = False
        for client in self.both(self.server.unix):
            greedy = dict(temperature=0)
            biased = client.sample(logits, logit_bias=[{69: -np.inf}, None, {2: 100.0}, {}], **greedy)
            self.assertEqual(biased.tokens.tolist(), [33, 69, 2, 69])
            masked = client.sample(logits, allowed_tokens=allowed, allowed_tokens_mask=[0, 1, -1, 0], **greedy)
            self.assertEqual(masked.tokens.tolist(), [33, 69, 69, 33])
            words = np.array([[2**32 - 1, 2**32 - 1, 2**5 - 1]], np.uint32)  # all but 69
            self.assertEqual(client.sample(logits, allowed_tokens=words, **greedy).tokens.tolist(), [33] * 4)
            punished = client.sample(
                logits,
                history=[[69], [69, 69, 33], [], [5]],
                frequency_penalty=4.0,
                presence_penalty=[1, 1, 0, 0],
                **greedy,
            )
            self.assertEqual(punished.tokens.tolist(), [33, 2, 69, 69])
            prompted = client.sample(logits, history=[69], presence_penalty=9.0, prompt_tokens=[1, 0, 1, 0], **greedy)
            self.assertEqual(prompted.tokens.tolist(), [69, 33, 69, 33])
            shared = client.sample(logits, history=[69], repetition_penalty=9.0, **greedy)
            self.assertEqual(shared.tokens.tolist(), [33] * 4)
            extra = client.sample(logits, extra_ids=[[0], [1, 2], [], [69]], **greedy)
            logprobs, _ = log_softmax(logits)
            self.assertEqual(extra.extra_logprobs.counts.tolist(), [1, 2, 0, 1])
            np.testing.assert_allclose(extra.extra_logprobs.values, logprobs[0, [0, 1, 2, 69]], rtol=1e-5)
            drawn = client.sample(logits, seed=2**64 - 1, top_k=1, min_p=0.5, logprob_mode=["raw", "processed"] * 2)
            np.testing.assert_allclose(drawn.logprobs, [logprobs[0, 69], 0] * 2, rtol=1e-5, atol=1e-6)
            tempered = client.sample(
                logits, seed=1, temperature=2.0, top_k=1, logprob_mode="tempered", extra_ids=[0, 69]
            )
            halves, _ = log_softmax(logits / 2)
            wanted = halves[:, [0, 69]].ravel()
            np.testing.assert_allclose(tempered.extra_logprobs.values, wanted, rtol=1e-5)
            np.testing.assert_allclose(tempered.logprobs, halves[:, 69], rtol=1e-5)
            self.assertIsNone(tempered.entropies)
            entropic = client.sample(logits, seed=1, temperature=2.0, want_entropy=[True, True, False, True])
            for got, of in ((entropic.entropies, halves), (entropic.raw_entropies, logprobs)):
                np.testing.assert_allclose(got, -(np.exp(of) * of).sum(-1) * [1, 1, 0, 1], rtol=1e-5, atol=1e-6)

    def test_a_support_is_what_the_filters_leave(self):
        for client in self.both(self.server.unix):
            result = client.sample(self.LOGITS, seed=0, top_k=[2, 0, 0], want_support=[3, 1, 0])
            self.assertEqual(result.support_size.tolist(), [2, 3, 0])
            self.assertEqual([row.tolist() for row in result.support_ids], [[0, 1], [0], []])
            np.testing.assert_allclose(np.exp(result.support_logprobs.values), [2 / 3, 1 / 3, 0.5], rtol=1e-5)
            self.assertIsNone(client.sample(self.LOGITS, seed=0).support_size)
            with self.refused(logitd.InvalidArgument, "want_support: got 4", "allowed 0..3"):
                client.sample(self.LOGITS, seed=0, want_support=4)

    def test_a_row_is_drawn_from_as_often_as_it_asks_for(self):
        for client in self.both(self.server.unix):
            result = client.sample(self.LOGITS, seed=0, position=[0, 1, 0], draws=[4, 0, 1])
            # Its bits as fractions: 0.8805, 0.9397, 0.7129, 0.0678.
            self.assertEqual([row.tolist() for row in result.draw_tokens], [[2, 2, 1, 0], [], [2]])
            np.testing.assert_allclose(np.exp(result.draw_logprobs.values), [0.25, 0.25, 0.25, 0.5, 0.25], rtol=1e-5)
            self.assertEqual(result.tokens.tolist(), [2, 0, 2])
            self.assertIsNone(client.sample(self.LOGITS, seed=0).draw_tokens)
            many = client.sample(np.zeros((1, 50000), np.float32), seed=3, draws=1024).draw_tokens[0]
            self.assertGreater(len(set(many.tolist())), 1000)
            with self.refused(logitd.InvalidArgument, "draws: got 1025", "allowed 0..1024"):
                client.sample(self.LOGITS, seed=0, draws=1025)
            with self.refused(logitd.InvalidArgument, "draws: got 2 at row 0", "allowed 0"):
                client.verify(self.LOGITS, seed=0, sequence_rows=[3], drafts=[1, 1], draws=2)

    def test_a_top_k_that_keeps_all_is_off(self):
        offs = [-1, 3, 4, 2**31 - 1, np.array([-1, 3, 1000])]
        report = dict(seed=5, position=[0, 1, 4], logprob_mode="processed", top_logprobs=3)
        drafts = dict(sequence_rows=[3], drafts=[2, 0], draft_kind="dense", draft_probs=np.full((2, 3), 1 / 3))
        for client in self.both(self.server.unix):
            calls = (
                lambda **params: client.sample(self.LOGITS, **report, **params),
                lambda **params: client.verify(self.LOGITS, **report, **drafts, **params),
            )
            for call in calls:
                want = call()
                for top_k in offs:
                    got = call(top_k=top_k)
                    for name in ("tokens", "logprobs", "status"):
                        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), f"{name} of {top_k}")
                    np.testing.assert_array_equal(got.top_logprobs.values, want.top_logprobs.values)
                with self.refused(logitd.InvalidArgument, "top_k: got -2 at row 1, allowed -1 or more"):
                    call(top_k=[-1, -2, 3])

    def test_one_number_gives_each_row_a_seed_of_its_own(self):
        first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]  # of SplitMix64 from 0
        self.assertEqual(_params.spread_seeds(0, 4).tolist(), first)
        # It adds this constant between two outputs, so the outputs of a number that much larger begin with the second.
        self.assertEqual(_params.spread_seeds(0x9E3779B97F4A7C15, 3).tolist(), first[1:])
        logits = np.zeros((64, 1000), np.float32)
        for client in self.both(self.server.unix):
            self.assertEqual(len(set(client.sample(logits, seed=7).tokens.tolist())), 1)
            drawn = client.sample(logits, seeds=7).tokens
            self.assertGreater(len(set(drawn.tolist())), 40)
            same = client.sample(logits, seed=_params.spread_seeds(7, 64)).tokens
            self.assertEqual(drawn.tolist(), same.tolist())
            # A row's seed depends on its place only.
            self.assertEqual(client.sample(logits[:9], seeds=np.uint64(7)).tokens.tolist(), drawn[:9].tolist())
            drafts = client.verify(logits[:4], sequence_rows=[2, 2], drafts=[1, 2], seeds=2**64 - 1, temperature=1.0)
            own = client.verify(
                logits[:4], sequence_rows=[2, 2], drafts=[1, 2], seed=_params.spread_seeds(2**64 - 1, 4), temperature=1.0
            )
            self.assertEqual(drafts.tokens.tolist(), own.tokens.tolist())
        with logitd.Client(self.server.unix) as client, client.sample_stream() as stream:
            stream.write(logits, seeds=7)
            self.assertEqual(stream.read().tokens.tolist(), drawn.tolist())

    def test_a_spread_that_cannot_be_made_is_refused(self):
        for params, text in (
            (dict(seeds=[1, 2]), "seeds: got 2 values, allowed one"),
            (dict(seeds=-1), "seeds: got -1, allowed 0 to 18446744073709551615"),
            (dict(seeds=2**64), "seeds: got 18446744073709551616, allowed 0 to"),
            (dict(seeds=1.5), "seeds: got 1.5, allowed whole numbers"),
            (dict(seeds=True), "seeds: got True, allowed whole numbers"),
            (dict(seeds=1, seed=2), "seeds: got a number beside seed, allowed one of them"),
        ):
            for client in self.both(self.server.unix):
                with self.refused(logitd.InvalidArgument, text):
                    client.sample(self.LOGITS, **params)
        for client in self.both(self.server.unix):
            with self.assertRaisesRegex(TypeError, "unknown parameter 'seeds'"):
                client.score(self.LOGITS, targets=[0, 0, 0], seeds=1)

    def test_words_of_signed_integers_are_masks(self):
        logits = np.zeros((2, 70), np.float32)
        logits[:, 69], logits[:, 31], logits[:, 2] = 9, 7, 5
        words = np.array([[-1, -1, 0b011111], [2**31 - 1, 0, 0]], np.int32)  # all but 69; below 31
        forms = [words, words.astype(">i4"), np.asfortranarray(words), words.view(np.uint32)]
        for client in self.both(self.server.unix):
            for mask in forms:
                got = client.sample(logits, allowed_tokens=mask, temperature=0).tokens
                self.assertEqual(got.tolist(), [31, 2])
            self.assertEqual(client.sample(logits, allowed_tokens=words[0], temperature=0).tokens.tolist(), [31, 31])

    def test_numbers_that_cannot_be_sent_are_refused(self):
        for client in self.both(self.server.unix):
            for params, texts in (
                (dict(seed=-1), ("seed: got -1, allowed 0 to 18446744073709551615",)),
                (dict(seed=2**64), ("seed: got 18446744073709551616",)),
                (dict(seed=1.5), ("seed: got 1.5, allowed whole numbers",)),
                (dict(seed=0, top_k=[2**31, 1, 1]), ("top_k: got 2147483648, allowed -2147483648 to 2147483647",)),
                (dict(seed=0, temperature="hot"), ("temperature", "allowed numbers")),
                (dict(seed=0, top_p=[[1.0]]), ("top_p: got 2 dimensions",)),
                (dict(seed=0, logprob_mode="rare"), ("logprob_mode: got 'rare', allowed 'raw', 'processed', 'tempered'",)),
                (dict(seed=0, want_rank=2), ("want_rank", "True and False")),
                (dict(seed=0, logit_bias=[(1, 2.0)]), ("logit_bias", "allowed a dict")),
                (dict(seed=0, allowed_tokens=np.ones((1, 3), np.float32)), ("allowed_tokens", "allowed bool")),
            ):
                with self.refused(logitd.InvalidArgument, *texts):
                    client.sample(self.LOGITS, **params)
            with self.assertRaisesRegex(TypeError, "unknown parameter 'topp', allowed .*top_p"):
                client.sample(self.LOGITS, seed=0, topp=1)


class VerifyTest(ServerTestCase):
    def test_greedy_drafts_are_accepted_where_sample_draws_them(self):
        logits = RANDOM.standard_normal((5, 60)).astype(np.float32) * 3
        best = logits.argmax(axis=1)
        drafts = [best[0], (best[1] + 1) % 60, best[3]]  # sequences of 3 and 2 rows
        for client in self.both(self.server.unix):
            result = client.verify(logits, sequence_rows=[3, 2], drafts=drafts, temperature=0)
            self.assertEqual(result.accepted.tolist(), [1, 1])
            self.assertEqual(result.status.tolist(), [0, 0, logitd.RowStatus.NOT_REACHED, 0, 0])
            self.assertEqual(result.tokens.tolist(), [best[0], best[1], -1, best[3], best[4]])

    def test_drafts_with_probabilities_of_every_kind(self):
        logits = np.zeros((2, 4), np.float32)
        logits[0, 1] = 20
        for client in self.both(self.server.unix):
            for kind, more in (
                ("list", dict(draft_ids=[[1, 3]], draft_probs=[[0.9, 0.1]])),
                ("list", dict(draft_ids=[1, 3], draft_probs=np.array([0.9, 0.1]))),
                ("dense", dict(draft_probs=np.array([[0.0, 0.9, 0.0, 0.1]], np.float32))),
            ):
                result = client.verify(logits, sequence_rows=[2], drafts=[1], draft_kind=kind, seed=[3], **more)
                self.assertEqual(result.accepted.tolist(), [1], kind)  # the target all but wants it
                self.assertEqual(result.tokens[0], 1)
            # The target draws token 1 first and after the drafts; between, p and q are the same.
            both = client.verify(
                np.concatenate([logits, logits[:1]]),
                sequence_rows=[3],
                drafts=[1, 1],
                draft_kind="dense",
                draft_probs=[[0.0, 0.9, 0.0, 0.1], [0.25, 0.25, 0.25, 0.25]],
                block_verification=True,
                seed=[3],
            )
            self.assertEqual((both.accepted.tolist(), both.tokens.tolist()), ([2], [1, 1, 1]))
            with self.refused(logitd.InvalidArgument, "draft_kind: got greedy at row 0, allowed list, dense with"):
                client.verify(logits, sequence_rows=[2], drafts=[1], block_verification=True, seed=[3])
            with self.refused(logitd.InvalidArgument, "draft_kind: got 'sure', allowed 'greedy', 'list', 'dense'"):
                client.verify(logits, sequence_rows=[2], drafts=[1], draft_kind="sure", seed=[3])


class ScoreTest(ServerTestCase):
    def test_a_perplexity_beyond_every_double_is_infinite(self):
        logits = np.zeros((3, 2), np.float32)
        logits[:, 1] = -800
        for client in self.both(self.server.unix):
            for call in (client.score, client.score_stream):
                totals = call(logits, targets=[1, 1, 1]).totals
                self.assertEqual((totals.loss_mean, totals.perplexity), (800, math.inf))

    def test_is_the_definition(self):
        logits = RANDOM.standard_normal((6, 700)).astype(np.float32) * 4
        targets = np.array([3, -100, 699, 0, 12, 12])
        capped = 10 * np.tanh(logits.astype(np.float64) / 10)
        logprobs, logsumexp = log_softmax(capped, 2.0)
        counted = targets != -100
        target = np.where(counted, logprobs[np.arange(6), np.where(counted, targets, 0)], 0)
        loss = -(1 - 0.1) * target - 0.1 * logprobs.mean(axis=1) + 1e-3 * logsumexp**2
        for client in self.both(self.server.unix):
            result = client.score(
                logits,
                targets=targets,
                softcap=10.0,
                temperature=2.0,
                label_smoothing=0.1,
                smoothing="torch",
                z_loss=1e-3,
                want_rank=True,
                want_entropy=True,
                top_logprobs=2,
            )
            np.testing.assert_allclose(result.target_logprobs, target, rtol=1e-5)
            np.testing.assert_allclose(result.losses, np.where(counted, loss, 0), rtol=1e-5)
            np.testing.assert_allclose(result.logsumexp, logsumexp, rtol=1e-5)
            np.testing.assert_allclose(result.entropies, -(np.exp(logprobs) * logprobs).sum(axis=1), rtol=1e-5)
            self.assertEqual(
                result.ranks.tolist(),
                [0 if t < 0 else order(row).tolist().index(t) + 1 for row, t in zip(logits, targets)],
            )
            self.assertEqual(result.top_ids[0].tolist(), order(logits[0])[:2].tolist())
            self.assertEqual((result.totals.rows, result.totals.counted, result.totals.ignored), (6, 5, 1))
            np.testing.assert_allclose(result.totals.perplexity, math.exp(-target.sum() / 5), rtol=1e-6)  # of f32 losses
            plain = client.score(logits, targets=targets)
            self.assertIsNone(plain.ranks)
            self.assertIsNone(plain.entropies)

    def test_the_supports_of_sample_give_its_logprobs_bit_by_bit(self):
        logits = RANDOM.standard_normal((40, 1000)).astype(np.float32) * 4
        temperatures = RANDOM.uniform(0.5, 2, 40).astype(np.float32)
        for client in self.both(self.server.unix):
            drawn = client.sample(
                logits, seed=1, position=list(range(40)), temperature=temperatures, top_p=0.9,
                logprob_mode="processed", want_support=1000,
            )  # fmt: skip
            asked = dict(targets=drawn.tokens, temperature=temperatures, support_ids=drawn.support_ids)
            for scored in (client.score(logits, **asked), client.score_stream(logits, **asked)):
                self.assertEqual(scored.target_logprobs.tobytes(), drawn.logprobs.tobytes())
                np.testing.assert_array_equal(scored.losses, -drawn.logprobs)
            lists = client.score(logits[:2], targets=[0, 1], support_ids=[[0, 5], []])
            want = logits[0, 0] - np.logaddexp(logits[0, 0], logits[0, 5])
            self.assertAlmostEqual(float(lists.target_logprobs[0]), float(want), places=5)
            self.assertEqual(lists.losses[1], client.score(logits[1:2], targets=[1]).losses[0])
            with self.refused(logitd.InvalidArgument, "target: got 0 at row 0", "one of its 1 support_ids"):
                client.score(logits[:1], targets=[0], support_ids=[[5]])

    def test_a_stream_gives_the_bits_of_one_call_whatever_its_messages(self):
        logits = RANDOM.standard_normal((5000, 64)).astype(np.float32)
        targets = RANDOM.integers(0, 64, 5000)
        params = dict(
            temperature=RANDOM.uniform(0.5, 2, 5000),
            extra_ids=[[i % 64] * (i % 3) for i in range(5000)],
            want_rank=True,
            top_logprobs=1,
        )
        for message_bytes in (64 * 4, 100_000, 1 << 30):
            for client in self.both(self.server.unix, score_message_bytes=message_bytes):
                if message_bytes == 256:
                    rows = slice(0, 300)
                    cut = dict(params, temperature=params["temperature"][rows], extra_ids=params["extra_ids"][rows])
                else:
                    rows, cut = slice(None), params
                whole = client.score(logits[rows], targets=targets[rows], **cut)
                seen = []
                streamed = client.score_stream(logits[rows], targets=targets[rows], progress=seen.append, **cut)
                for name in ("losses", "target_logprobs", "ranks", "logsumexp", "status"):
                    np.testing.assert_array_equal(getattr(streamed, name), getattr(whole, name), name)
                for name in ("top_ids", "top_logprobs", "extra_logprobs"):
                    np.testing.assert_array_equal(getattr(streamed, name).values, getattr(whole, name).values, name)
                    np.testing.assert_array_equal(getattr(streamed, name).offsets, getattr(whole, name).offsets, name)
                self.assertAlmostEqual(streamed.totals.loss_sum, whole.totals.loss_sum, places=6)
                self.assertEqual(seen[-1].rows, len(whole.losses))
                self.assertEqual(seen[-1].totals, streamed.totals)
                self.assertEqual(len(seen), {256: 300, 100_000: 13, 1 << 30: 2}[message_bytes])

    def test_a_call_that_begins_where_another_was_stopped_has_the_totals_of_both(self):
        logits = RANDOM.standard_normal((90, 32)).astype(np.float32)
        targets = RANDOM.integers(0, 32, 90)
        for client in self.both(self.server.unix, score_message_bytes=32 * 4 * 10):
            whole = client.score_stream(logits, targets=targets)
            stood = []
            with self.refused(logitd.Cancelled, "stopped after 40 of 90 rows"):
                client.score_stream(logits, targets=targets, progress=lambda p: stood.append(p) or p.rows < 40)
            at = stood[-1].rows
            rest = client.score_stream(logits[at:], targets=targets[at:], offset=at, totals=stood[-1].totals)
            self.assertEqual(rest.totals, whole.totals)
            self.assertEqual(rest.offset, 40)

    def test_what_cannot_be_cut_is_refused_unsent(self):
        logits = np.zeros((4, 8), np.float32)
        for client in self.both(self.server.unix):
            for params, text in (
                (dict(targets=[1, 2]), "targets: got 2 values, allowed 4 (rows)"),
                (dict(targets=[1] * 4, temperature=[1, 1, 1]), "temperature: got 3 values"),
                (dict(targets=[1] * 4, extra_ids=[[1], [2]]), "got 2 lists, allowed one, or 4 (rows)"),
            ):
                with self.refused(logitd.InvalidArgument, text) as caught:
                    client.score_stream(logits, **params)
                self.assertEqual(caught.exception.attempts, 0)


def write_head(folder, weight, **config):
    """A model's folder with only an output head, and these settings."""
    data = np.ascontiguousarray(weight, np.float32).tobytes()
    header = json.dumps(
        {"lm_head.weight": {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [0, len(data)]}}
    ).encode()
    pathlib.Path(folder).mkdir()
    pathlib.Path(folder, "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    pathlib.Path(folder, "config.json").write_text(json.dumps({"vocab_size": weight.shape[0], **config}))


class HeadsTest(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.TemporaryDirectory()
        cls.weight = RANDOM.standard_normal((500, 64)).astype(np.float32)
        write_head(os.path.join(cls.root.name, "tiny"), cls.weight)
        write_head(os.path.join(cls.root.name, "new"), cls.weight, model_type="never_seen")
        cls.server = RunningServer(f"--head-root={cls.root.name}")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.root.cleanup()

    def test_a_loaded_head_has_its_warnings(self):
        for client in self.both(self.server.unix):
            head = client.load_head("new", "new")
            self.assertEqual(len(head.warnings), 1)
            self.assertIn("model_type 'never_seen' is not known", head.warnings[0])
            self.assertEqual(client.get_head("new"), head)
            client.unload_head("new")

    def test_a_head_is_loaded_used_and_unloaded(self):
        hidden = RANDOM.standard_normal((3, 64)).astype(np.float32)
        logits = hidden.astype(np.float64) @ self.weight.T.astype(np.float64)
        for client in self.both(self.server.unix):
            progress = []
            head = client.load_head("lm", "tiny", progress=lambda done, total: progress.append((done, total)))
            self.assertEqual(
                (head.name, head.vocab, head.hidden, head.dtype, head.tensor), ("lm", 500, 64, "f32", "lm_head.weight")
            )
            self.assertEqual(progress[-1][1], 500 * 64 * 4)
            self.assertEqual(client.get_head("lm"), head)
            self.assertEqual(client.list_heads(), [head])
            top = client.top_k(hidden=hidden, head="lm", k=4)
            self.assertEqual(top.indices.dense().tolist(), [order(row)[:4].tolist() for row in logits])
            token = client.sample(hidden=hidden, head="lm", temperature=0).tokens
            self.assertEqual(token.tolist(), logits.argmax(axis=1).tolist())
            drafts = [token[0], (token[1] + 1) % 500]
            verified = client.verify(hidden=hidden, head="lm", sequence_rows=3, drafts=drafts, temperature=0)
            self.assertEqual((verified.accepted.tolist(), verified.tokens.tolist()), ([1], [*token[:2], -1]))
            self.assertEqual(verified.head_version, top.head_version)
            listed = dict(draft_kind="list", draft_ids=[[int(token)] for token in drafts], draft_probs=[1.0, 1.0])
            dense = dict(draft_kind="dense", draft_probs=np.eye(500, dtype=np.float32)[drafts])
            for kind in (listed, dense):
                for block in (False, True):
                    again = client.verify(
                        hidden=hidden, head="lm", sequence_rows=3, drafts=drafts, temperature=0,
                        block_verification=block, **kind,
                    )  # fmt: skip
                    self.assertEqual(again.accepted.tolist(), [1])
                    self.assertEqual(again.tokens.tolist(), verified.tokens.tolist())
            every = client.sample(hidden=hidden, head="lm", seed=2).tokens
            kept = client.sample(hidden=hidden, head="lm", seed=2, top_k=[-1, 500, 501]).tokens
            self.assertEqual(kept.tolist(), every.tolist())
            targets = [1, 2, 3]
            want = -log_softmax(logits)[0][np.arange(3), targets]
            np.testing.assert_allclose(client.score(hidden=hidden, head="lm", targets=targets).losses, want, rtol=1e-5)
            streamed = client.score_stream(hidden=hidden, head="lm", targets=targets)
            np.testing.assert_allclose(streamed.losses, want, rtol=1e-5)
            with self.refused(logitd.AlreadyExists, "lm"):
                client.load_head("lm", "tiny")
            client.unload_head("lm")
            self.assertEqual(client.list_heads(), [])
            cut = client.load_head("cut", "tiny", shard=True)
            self.assertEqual(cut.shards, [logitd.HeadShard(0, 0, 500, cut.device_bytes)])
            self.assertEqual((head.shards, head.warnings), ([], []))
            again = client.top_k(hidden=hidden, head="cut", k=4)
            self.assertEqual(again.probs.dense().tolist(), top.probs.dense().tolist())
            client.unload_head("cut")
            with self.refused(logitd.NotFound, "lm"):
                client.unload_head("lm")
            with self.refused(logitd.NotFound):
                client.top_k(hidden=hidden, head="lm", k=4)

    def test_progress_can_end_a_load(self):
        for client in self.both(self.server.unix):
            with self.refused(logitd.Cancelled, "stopped by progress"):
                client.load_head("stopped", "tiny", progress=lambda done, total: False)
            # The server may hear of the end before or after the head is there. One more load is answered after both.
            loading = True
            while loading:
                try:
                    client.load_head("stopped", "tiny")
                    loading = False
                except logitd.AlreadyExists as error:
                    loading = "being loaded" in str(error)
            client.unload_head("stopped")

    def test_a_wrong_input_is_refused(self):
        row = np.zeros((1, 64), np.float32)
        for client in self.both(self.server.unix):
            for inputs, text in (
                (dict(), "got none"),
                (dict(logits=row, hidden=row, head="lm"), "got both"),
                (dict(hidden=row), "head: got None with hidden"),
                (dict(logits=row, head="lm"), "head: got 'lm' with logits"),
                (dict(logits=row.astype(np.float64)), "got an array of float64, allowed float32"),
                (dict(logits=row[None]), "got shape [1, 1, 64]"),
                (dict(logits=row, dtype="bf16"), "allowed dtype='f32'"),
                (dict(logits=row, dtype="f64"), "dtype: got 'f64', allowed f32, f16, bf16"),
            ):
                with self.refused(logitd.InvalidArgument, text):
                    client.top_k(k=1, **inputs)
            with self.refused(logitd.NotFound, "head x: missing"):
                client.load_head("x", "missing")
